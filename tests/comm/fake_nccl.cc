// A libnccl for ranks that are processes of one host, beside the CUDA driver of fake_gpu.cc: its
// streams do what is queued here, and wait there for ranks that do not come.
//
// What is wrong with how it is used ends the program: a communicator that two threads use at once,
// or that has been freed.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "fake_fabric.h"
#include "fake_knobs.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using jitkern::CUstream;
using namespace fake;

fake::Knobs fake::knobs;

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

struct UniqueId {
  char path[128];
};

namespace {

constexpr u32 kAlive = 0xc0117ec7;
constexpr int kPauseUs = 20;

void rest() { usleep(kPauseUs); }

// What outlives the communicator, for what is queued.
struct State {
  State(const std::string& path, int rank, int size, int device)
      : device(device), fabric(path, rank, size, stop) {}

  const int device;
  std::atomic<bool> stop{false};
  std::atomic<int> result{kSuccess};
  std::atomic<i64> num_unfinished{0};
  std::atomic<bool> is_running{false};
  bool is_connected = false;  // used by one call at a time, as what follows
  std::set<int> peers;
  u64 num_windows = 0;
  Fabric fabric;
};
using StatePtr = std::shared_ptr<State>;

}  // namespace

// Never freed, so that its use after that is noticed.
struct Comm {
  std::atomic<u32> magic{kAlive};
  std::atomic<int> num_users{0};
  StatePtr state;
};

namespace {

StatePtr require(Comm* comm, const char* what) {
  if (comm == nullptr) fail_program(std::string(what) + " gets no communicator");
  if (comm->magic != kAlive) fail_program(std::string(what) + " gets a freed communicator");
  return comm->state;
}

// What NCCL says of a wait that was for nothing.
int stopped(const StatePtr& state) {
  if (!state->fabric.is_broken()) return kInvalidUsage;  // aborted
  const std::lock_guard<std::mutex> lock(knobs.mutex);
  knobs.last_error = "socketProgress: Connection closed by remote peer";
  return state->result = kRemoteError;
}

class Use {
 public:
  Use(Comm* comm, const char* what) : state(require(comm, what)), comm_(comm) {
    if (comm_->num_users.fetch_add(1) != 0) {
      fail_program(std::string(what) + " is called while another thread uses the communicator");
    }
  }
  ~Use() { comm_->num_users.fetch_sub(1); }

  const StatePtr state;

 private:
  Comm* comm_;
};

struct Call {
  bool is_transfer;
  Collective collective;
  Transfer transfer;
};
using Calls = std::vector<Call>;

thread_local int group_depth = 0;
thread_local std::vector<Comm*> group_comms;
thread_local Calls group_calls;
thread_local CUstream group_stream = nullptr;

// On the GPU.
void execute(const StatePtr& state, const Calls& calls, bool is_lost) {
  if (state->is_running.exchange(true) && !state->stop) {
    fail_program("does two operations of one communicator at once");
  }
  std::vector<Transfer> transfers;
  for (const Call& call : calls) {
    if (call.is_transfer) {
      transfers.push_back(call.transfer);
    } else if (!state->fabric.run(call.collective)) {
      break;
    }
  }
  if (!state->stop) state->fabric.run(std::move(transfers));
  if (state->fabric.is_broken()) stopped(state);
  while ((is_lost || state->fabric.is_broken()) && !state->stop) rest();
  state->is_running = false;
}

void enqueue(const StatePtr& state, const Calls& calls, CUstream stream, bool is_lost) {
  const auto queue = [state, calls, is_lost](CUstream on) {
    ++knobs.num_unfinished;
    ++state->num_unfinished;
    run_on(on, [state, calls, is_lost] {
      execute(state, calls, is_lost);
      --state->num_unfinished;
      --knobs.num_unfinished;
    });
  };
  if (is_capturing()) {
    const std::lock_guard<std::mutex> lock(knobs.mutex);
    knobs.captured.push_back(queue);
    return;
  }
  // As cuLaunchKernel does. With an abort in that moment the CUDA context would be lost.
  while (knobs.num_unfinished >= knobs.queue_limit) {
    if (state->stop) fail_program("is aborted in front of a full launch queue");
    rest();
  }
  queue(stream);
}

int launch(Comm* comm, Calls calls, CUstream stream) {
  const Use use(comm, "a collective");
  const StatePtr state = use.state;
  if (const int result = knobs.next_result.exchange(kSuccess); result != kSuccess) return result;
  if (state->result != kSuccess) return state->result;
  if (state->stop) return kInvalidUsage;
  if (stream == nullptr) fail_program("is given no stream");
  if (device_of(stream) != state->device) fail_program("is given another device's stream");
  const bool is_lost = ++knobs.num_queued_calls == knobs.failing_call;

  bool meets_all = false;
  std::vector<int> peers;
  for (const Call& call : calls) {
    if (!call.is_transfer) {
      meets_all |= !state->is_connected;
    } else if (state->peers.insert(call.transfer.peer).second) {
      peers.push_back(call.transfer.peer);
    }
  }
  state->is_connected |= meets_all;
  bool is_there = !meets_all || state->fabric.meet(Fabric::kConnect, 1);
  for (const int peer : peers) state->fabric.want_peer(peer);
  for (const int peer : peers) is_there = is_there && state->fabric.meet_peer(peer);
  if (!is_there) return stopped(state);
  enqueue(state, calls, stream, is_lost);
  if (is_lost) state->result = kRemoteError;
  return kSuccess;
}

int submit(Comm* comm, const Call& call, CUstream stream) {
  if (group_depth == 0) return launch(comm, {call}, stream);
  group_comms.push_back(comm);
  group_calls.push_back(call);
  group_stream = stream;
  return kSuccess;
}

void require_gpu(const void* data, i64 bytes) { require_memory(data, bytes, "a collective"); }

int collective(Comm* comm, CUstream stream, Collective what) {
  const int size = require(comm, "a collective")->fabric.size;
  const i64 bytes = what.count * item_bytes(what.dtype);
  require_gpu(what.x, bytes * (what.kind == Collective::kReduceScatter ? size : 1));
  require_gpu(what.output, bytes * (what.kind == Collective::kAllGather ? size : 1));
  return submit(comm, {false, what, {}}, stream);
}

int transfer(Comm* comm, CUstream stream, const Transfer& what) {
  require_gpu(what.data, what.bytes);
  return submit(comm, {true, {}, what}, stream);
}

void free_comm(Comm* comm) {
  comm->state->fabric.leave();
  comm->magic = 0xdead;
  --knobs.num_comms;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  const char* given = std::getenv("FAKE_NCCL_VERSION");
  return *version = given == nullptr ? 22809 : std::atoi(given), kSuccess;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == kRemoteError       ? "remote process exited or there was a network error"
         : result == kInvalidArgument ? "invalid argument"
         : result == kInvalidUsage    ? "invalid usage"
         : result == kSystemError     ? "unhandled system error"
                                      : "unknown result code";
}
EXPORT const char* ncclGetLastError(Comm* comm) {
  if (comm != nullptr) require(comm, "ncclGetLastError");
  static thread_local std::string kept;
  const std::lock_guard<std::mutex> lock(knobs.mutex);
  return (kept = knobs.last_error).c_str();
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->path, sizeof(id->path), "%s", Fabric::make().c_str());
  return kSuccess;
}

// ncclConfig_t of 2.18, whose users say its size and its version.
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
EXPORT int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Config* config) {
  if (config->size != 48 || config->magic != 0xcafebeef || config->version < 21800 ||
      config->blocking != 1) {
    fail_program("is given a wrong configuration");
  }
  if (const int result = knobs.next_result.exchange(kSuccess); result != kSuccess) return result;
  if (rank < 0 || rank >= size) return kInvalidArgument;
  auto* made = new Comm();
  const auto state = std::make_shared<State>(id.path, rank, size, current_device());
  if (state->fabric.is_empty()) return kSystemError;
  made->state = state;
  ++knobs.num_comms;
  *comm = made;
  return state->fabric.meet(Fabric::kJoin, 1) ? kSuccess : stopped(state);
}
EXPORT int ncclCommGetAsyncError(Comm* comm, int* result) {
  return *result = Use(comm, "ncclCommGetAsyncError").state->result, kSuccess;
}
EXPORT int ncclCommFinalize(Comm* comm) {
  const Use use(comm, "ncclCommFinalize");
  while (use.state->num_unfinished > 0 && !use.state->stop) rest();
  return kSuccess;
}
EXPORT int ncclCommDestroy(Comm* comm) {
  const Use use(comm, "ncclCommDestroy");
  while (knobs.num_graphs > 0) rest();
  free_comm(comm);
  return kSuccess;
}
EXPORT int ncclCommAbort(Comm* comm) {
  const StatePtr state = require(comm, "ncclCommAbort");
  state->stop = true;
  if (comm->num_users > 0) {
    // NCCL would free what that thread uses, a few milliseconds from now.
    for (int ms = 0; comm->num_users > 0; ++ms) {
      if (ms > 100) fail_program("frees a communicator that another thread uses");
      usleep(1000);
    }
  }
  const Use use(comm, "ncclCommAbort");
  while (knobs.num_graphs > 0) rest();
  free_comm(comm);
  return kSuccess;
}

EXPORT int ncclAllReduce(const char* x, char* output, size_t count, int dtype, int op, Comm* comm,
                         CUstream stream) {
  return collective(comm, stream, {Collective::kAllReduce, x, output, i64(count), dtype, op, 0});
}
EXPORT int ncclReduceScatter(const char* x, char* output, size_t count, int dtype, int op,
                             Comm* comm, CUstream stream) {
  return collective(comm, stream,
                    {Collective::kReduceScatter, x, output, i64(count), dtype, op, 0});
}
EXPORT int ncclAllGather(const char* x, char* output, size_t count, int dtype, Comm* comm,
                         CUstream stream) {
  return collective(comm, stream, {Collective::kAllGather, x, output, i64(count), dtype, 0, 0});
}
EXPORT int ncclBroadcast(const char* x, char* output, size_t count, int dtype, int root, Comm* comm,
                         CUstream stream) {
  return collective(comm, stream, {Collective::kBroadcast, x, output, i64(count), dtype, 0, root});
}
EXPORT int ncclSend(const char* x, size_t count, int dtype, int peer, Comm* comm, CUstream stream) {
  const i64 bytes = i64(count) * item_bytes(dtype);
  return transfer(comm, stream, {true, peer, const_cast<char*>(x), bytes});
}
EXPORT int ncclRecv(char* x, size_t count, int dtype, int peer, Comm* comm, CUstream stream) {
  return transfer(comm, stream, {false, peer, x, i64(count) * item_bytes(dtype)});
}
EXPORT int ncclGroupStart() { return ++group_depth, kSuccess; }
EXPORT int ncclGroupEnd() {
  if (--group_depth > 0 || group_calls.empty()) return kSuccess;
  Comm* const comm = group_comms[0];
  for (Comm* const one : group_comms) {
    if (one != comm) fail_program("gets a group of two communicators, which the tests do not use");
  }
  group_comms.clear();
  return launch(comm, std::exchange(group_calls, {}), group_stream);
}

EXPORT int ncclMemAlloc(char** pointer, size_t bytes) {
  *pointer = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  know(*pointer, i64(bytes), jitkern::kMemoryTypeDevice, current_device());
  return kSuccess;
}
EXPORT int ncclMemFree(char* pointer) {
  forget(pointer);
  return std::free(pointer), kSuccess;
}
EXPORT int ncclCommWindowRegister(Comm* comm, char* pointer, size_t bytes, void** window, int) {
  const Use use(comm, "ncclCommWindowRegister");
  require_memory(pointer, i64(bytes), "what is registered");
  if (!use.state->fabric.meet(Fabric::kWindow, ++use.state->num_windows)) {
    return stopped(use.state);
  }
  return *window = pointer, kSuccess;
}
EXPORT int ncclCommWindowDeregister(Comm* comm, void* window) {
  const Use use(comm, "ncclCommWindowDeregister");
  require_memory(window, 1, "what is registered no more");
  return kSuccess;
}
