// A libnccl for ranks that are processes of one host, in front of ../fake_driver.c. A rank has one
// stream: a thread that does what is queued, in order, over memory that the ranks share, and that
// waits there for ranks that do not come.
//
// Misuse ends the program: two threads use a communicator at once, it has been freed, or another
// device's context is current.
#include <fcntl.h>
#include <jitkern/driver.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace jitkern;

enum Result : int { kSuccess = 0, kSystemError = 2, kInvalidUsage = 5, kRemoteError = 6 };

namespace {

constexpr u32 kAlive = 0xc0117ec7;
constexpr int kMaxRanks = 4;
constexpr i64 kSlotBytes = i64(16) << 20;
constexpr i64 kMessageBytes = i64(4) << 20;

void rest() { usleep(20); }

[[noreturn]] void fail_program(const std::string& what) {
  std::fprintf(stderr, "FAILED: the GPU %s\n", what.c_str());
  std::abort();
}

// Settings and counters of tests.
std::atomic<i64> queue_limit{i64(1) << 30};  // unfinished operations
std::atomic<i64> num_graphs{0};              // that have captured a communicator
std::atomic<i64> num_comms{0}, num_events{0};
std::atomic<bool> has_capture{false};
std::atomic<int> next_result{0};
std::atomic<bool> is_broken{false};  // NCCL has heard that a rank is gone
std::mutex guard;                    // guards the following
std::string last_error;
std::vector<std::function<void()>> captured;
thread_local CUcontext current = nullptr;

// The one stream; its thread is never joined.
struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  std::atomic<i64> num_put{0}, num_done{0};
  int device = -1;

  void put(std::function<void()> operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (num_put++ == 0) std::thread([this] { loop(); }).detach();
    work.push_back(std::move(operation));
    changed.notify_all();
  }
  void loop() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return !work.empty(); });
      const std::function<void()> operation = std::move(work.front());
      work.pop_front();
      lock.unlock();
      operation();
      ++num_done;
    }
  }
  void synchronize() const {
    for (const i64 last = num_put; num_done < last;) rest();
  }
};
Stream& stream = *new Stream;

// The memory that ranks share: zeros at first. Only pages that are touched take memory.
struct Shared {
  struct Rank {
    std::atomic<u64> met;
    std::atomic<u64> posted;  // collective whose data is in the slot
    std::atomic<u64> read;    // collective of which this rank has read all slots
    alignas(64) char slot[kSlotBytes];
  };
  struct Channel {
    std::atomic<u64> sent, received;
    char data[kMessageBytes];
  };
  Rank ranks[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];
};

struct Call {
  enum Kind : int { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kSend, kRecv };
  Kind kind;
  const char* x;
  char* output;
  i64 count;  // items, the argument of NCCL's function
  int dtype;
  int op;
  int peer;  // or root
};

// NCCL's numbers of the dtypes and of the reduction that tests use over this library.
enum : int { kInt8 = 0, kUint8 = 1, kInt32 = 2, kFloat32 = 7, kSum = 0 };

i64 item_bytes(int dtype) { return dtype == kInt8 || dtype == kUint8 ? 1 : 4; }

template <class T>
void add(const char* from, i64 bytes, char* to) {
  for (i64 at = 0; at < bytes; at += sizeof(T)) {
    *reinterpret_cast<T*>(to + at) += *reinterpret_cast<const T*>(from + at);
  }
}

// The state that queued operations use; it outlives the communicator.
struct State {
  State(const char* path, int rank, int size) : rank(rank), size(size) {
    const int file = open(path, O_RDWR);
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED || size > kMaxRanks) fail_program("has no memory for these ranks");
    close(file);
    shared = static_cast<Shared*>(at);
  }
  ~State() { munmap(shared, sizeof(Shared)); }

  // Each wait returns false once the communicator is aborted.
  bool wait(const std::function<bool()>& until) const {
    while (!until()) {
      if (stop.load(std::memory_order_acquire)) return false;
      rest();
    }
    return true;
  }
  bool all(const std::function<bool(const Shared::Rank&)>& is_there) const {
    return wait([&] { return std::all_of(shared->ranks, shared->ranks + size, is_there); });
  }
  bool meet() {
    const u64 number = ++num_meetings;
    shared->ranks[rank].met = number;
    return all([&](const auto& peer) { return peer.met >= number; });
  }

  bool collective(const Call& call) {
    const u64 number = ++num_steps;
    const i64 bytes = call.count * item_bytes(call.dtype);
    const bool is_scatter = call.kind == Call::kReduceScatter;
    const i64 own_bytes = is_scatter ? size * bytes : bytes;
    if (own_bytes > kSlotBytes) fail_program("is given more than tests have");
    auto& own = shared->ranks[rank];
    if (!all([&](const auto& peer) { return peer.read + 1 >= number; })) return false;
    if (call.kind != Call::kBroadcast || call.peer == rank)
      std::memcpy(own.slot, call.x, own_bytes);
    own.posted = number;
    if (!all([&](const auto& peer) { return peer.posted >= number; })) return false;
    for (int peer = 0; peer < size; ++peer) {
      const char* const slot = shared->ranks[peer].slot;
      if (call.kind == Call::kAllGather) std::memcpy(call.output + peer * bytes, slot, bytes);
      if (call.kind == Call::kBroadcast && peer == call.peer) std::memcpy(call.output, slot, bytes);
    }
    if (call.kind == Call::kAllReduce || is_scatter) {
      const bool is_float = call.dtype == kFloat32;
      if (call.op != kSum || (!is_float && call.dtype != kInt32)) fail_program("sums no such type");
      const i64 from = is_scatter ? rank * bytes : 0;
      std::memcpy(call.output, shared->ranks[0].slot + from, static_cast<size_t>(bytes));
      for (int peer = 1; peer < size; ++peer) {
        (is_float ? add<float> : add<int>)(shared->ranks[peer].slot + from, bytes, call.output);
      }
    }
    own.read = number;
    return true;
  }

  bool transfer(const Call& call) {
    const bool is_send = call.kind == Call::kSend;
    auto& channel = is_send ? shared->channels[rank][call.peer] : shared->channels[call.peer][rank];
    if (!wait([&] { return (channel.sent == channel.received) == is_send; })) return false;
    const i64 bytes = call.count * item_bytes(call.dtype);
    if (bytes > kMessageBytes) fail_program("is given more than tests have");
    std::memcpy(is_send ? channel.data : call.output, is_send ? call.x : channel.data,
                static_cast<size_t>(bytes));
    ++(is_send ? channel.sent : channel.received);
    return true;
  }

  // On the GPU.
  void execute(const Call& call) {
    if (is_running.exchange(true) && !stop) {
      fail_program("does two operations of one communicator at once");
    }
    const bool is_done = call.kind < Call::kSend ? collective(call) : transfer(call);
    if (is_done) is_running = false;
  }

  const int rank, size;
  std::atomic<bool> stop{false};
  std::atomic<bool> is_running{false};
  bool is_connected = false;  // this and the following are used by one call at a time
  u64 num_meetings = 0, num_steps = 0;
  Shared* shared = nullptr;
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

void require_context() {
  if (reinterpret_cast<i64>(current) != stream.device + 1) fail_program("has another context");
}

StatePtr require(Comm* comm, const char* what) {
  if (comm == nullptr) fail_program(std::string(what) + " gets no communicator");
  if (comm->magic != kAlive) fail_program(std::string(what) + " gets a freed communicator");
  return comm->state;
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

void enqueue(const StatePtr& state, const Call& call) {
  const auto queue = [state, call] { stream.put([state, call] { state->execute(call); }); };
  if (has_capture) {
    const std::lock_guard<std::mutex> lock(guard);
    captured.push_back(queue);
    return;
  }
  // Blocks like cuLaunchKernel. An abort during that would cost the CUDA context.
  while (stream.num_put - stream.num_done >= queue_limit) {
    if (state->stop) fail_program("is aborted in front of a full launch queue");
    rest();
  }
  queue();
}

int submit(Comm* comm, Stream* given, const Call& call) {
  const Use use(comm, "a collective");
  const StatePtr state = use.state;
  if (const int result = next_result.exchange(kSuccess); result != kSuccess) return result;
  if (is_broken) return kRemoteError;
  if (state->stop) return kInvalidUsage;
  if (given != &stream) fail_program("is given another stream");
  require_context();
  if (!state->is_connected && call.kind < Call::kSend) {
    state->is_connected = true;
    if (!state->meet()) return is_broken ? kRemoteError : kInvalidUsage;
  }
  enqueue(state, call);
  return kSuccess;
}

void free_comm(Comm* comm) {
  while (num_graphs > 0) rest();
  comm->magic = 0xdead;
  --num_comms;
}

}  // namespace

struct UniqueId {
  char path[128];
};

EXPORT int ncclGetVersion(int* version) {
  const char* given = std::getenv("FAKE_NCCL_VERSION");
  return *version = given == nullptr ? 22809 : std::atoi(given), kSuccess;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == kRemoteError   ? "remote process exited or there was a network error"
         : result == kSystemError ? "unhandled system error"
                                  : "invalid usage";
}
EXPORT const char* ncclGetLastError(Comm* comm) {
  if (comm != nullptr) require(comm, "ncclGetLastError");
  static thread_local std::string kept;
  const std::lock_guard<std::mutex> lock(guard);
  return (kept = last_error).c_str();
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  const char* folder = std::getenv("FAKE_NCCL_FOLDER");
  std::snprintf(id->path, sizeof(id->path), "%s/fake-nccl-XXXXXX",
                folder == nullptr ? "/dev/shm" : folder);
  const int file = mkstemp(id->path);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) fail_program("has no folder");
  return close(file), kSuccess;
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
  *comm = new Comm();
  require_context();
  const StatePtr state = std::make_shared<State>(id.path, rank, size);
  (*comm)->state = state;
  ++num_comms;
  if (!state->meet()) return kInvalidUsage;
  if (rank == 0) unlink(id.path);  // all have mapped it
  return kSuccess;
}
EXPORT int ncclCommGetAsyncError(Comm* comm, int* result) {
  const Use use(comm, "ncclCommGetAsyncError");
  return *result = is_broken ? kRemoteError : kSuccess, kSuccess;
}
EXPORT int ncclCommFinalize(Comm* comm) {
  const Use use(comm, "ncclCommFinalize");
  while (stream.num_done < stream.num_put && !use.state->stop) rest();
  return kSuccess;
}
EXPORT int ncclCommDestroy(Comm* comm) {
  const Use use(comm, "ncclCommDestroy");
  return free_comm(comm), kSuccess;
}
EXPORT int ncclCommAbort(Comm* comm) {
  require(comm, "ncclCommAbort")->stop = true;
  // NCCL would free memory that another thread uses a few milliseconds later.
  for (int ms = 0; comm->num_users > 0; ++ms) {
    if (ms > 100) fail_program("frees a communicator that another thread uses");
    usleep(1000);
  }
  const Use use(comm, "ncclCommAbort");
  return free_comm(comm), kSuccess;
}

EXPORT int ncclAllReduce(const char* x, char* output, size_t count, int dtype, int op, Comm* comm,
                         Stream* on) {
  return submit(comm, on, {Call::kAllReduce, x, output, i64(count), dtype, op, 0});
}
EXPORT int ncclReduceScatter(const char* x, char* output, size_t count, int dtype, int op,
                             Comm* comm, Stream* on) {
  return submit(comm, on, {Call::kReduceScatter, x, output, i64(count), dtype, op, 0});
}
EXPORT int ncclAllGather(const char* x, char* output, size_t count, int dtype, Comm* comm,
                         Stream* on) {
  return submit(comm, on, {Call::kAllGather, x, output, i64(count), dtype, 0, 0});
}
EXPORT int ncclBroadcast(const char* x, char* output, size_t count, int dtype, int root, Comm* comm,
                         Stream* on) {
  return submit(comm, on, {Call::kBroadcast, x, output, i64(count), dtype, 0, root});
}
EXPORT int ncclSend(const char* x, size_t count, int dtype, int peer, Comm* comm, Stream* on) {
  return submit(comm, on, {Call::kSend, x, nullptr, i64(count), dtype, 0, peer});
}
EXPORT int ncclRecv(char* x, size_t count, int dtype, int peer, Comm* comm, Stream* on) {
  return submit(comm, on, {Call::kRecv, nullptr, x, i64(count), dtype, 0, peer});
}
EXPORT int ncclMemAlloc(char** pointer, size_t bytes) {
  *pointer = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  return kSuccess;
}
EXPORT int ncclMemFree(char* pointer) { return std::free(pointer), kSuccess; }
EXPORT int ncclCommWindowRegister(Comm* comm, char* pointer, size_t bytes, void** window, int) {
  const Use use(comm, "ncclCommWindowRegister");
  if (bytes == 0) fail_program("registers no memory");
  if (!use.state->meet()) return is_broken ? kRemoteError : kInvalidUsage;
  return *window = pointer, kSuccess;
}
EXPORT int ncclCommWindowDeregister(Comm* comm, void* window) {
  const Use use(comm, "ncclCommWindowDeregister");
  return window == nullptr ? kInvalidUsage : kSuccess;
}

// Functions for tests in Python.
EXPORT void fake_nccl_queue_limit(i64 limit) { queue_limit = limit; }
EXPORT void fake_nccl_graphs(i64 count) { num_graphs = count; }
// The next call returns this.
EXPORT void fake_nccl_next_result(int result, const char* text) {
  const std::lock_guard<std::mutex> lock(guard);
  last_error = text;
  next_result = result;
}
// NCCL has seen a closed connection, like over a network.
EXPORT void fake_nccl_break(int is_on) {
  const std::lock_guard<std::mutex> lock(guard);
  last_error = "socketProgress: Connection closed by remote peer";
  is_broken = is_on != 0;
}
EXPORT i64 fake_nccl_num_comms() { return num_comms; }
EXPORT void fake_nccl_replay() {
  const std::lock_guard<std::mutex> lock(guard);
  for (const auto& queue : captured) queue();
}
EXPORT void fake_nccl_forget_graph() {
  const std::lock_guard<std::mutex> lock(guard);
  captured.clear();
}
EXPORT Stream* fake_stream(int device) { return stream.device = device, &stream; }
EXPORT void fake_synchronize() { stream.synchronize(); }
EXPORT void fake_capturing(int is_on) { has_capture = is_on != 0; }
EXPORT i64 fake_num_events() { return num_events; }

// The driver ends a process when its GPUs are done.
static void __attribute__((destructor)) wait_for_stream() {
  if (std::getenv("FAKE_EXIT_WAITS") != nullptr) stream.synchronize();
}

// -- the driver: what fake_driver.c has otherwise. A context is a device's number and one, an event
// a place in the stream.

EXPORT int fake_gpu_count() { return kMaxRanks; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, 0; }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return current = context, 0; }
EXPORT CUresult cuStreamIsCapturing(Stream*, int* status) { return *status = has_capture, 0; }
EXPORT CUresult cuEventCreate(i64** event, unsigned) {
  ++num_events;
  return *event = new i64(0), 0;
}
EXPORT CUresult cuEventRecord(i64* event, Stream*) {
  require_context();
  return *event = stream.num_put, 0;
}
EXPORT CUresult cuEventQuery(const i64* event) {
  return stream.num_done >= *event ? kCudaSuccess : kCudaErrorNotReady;
}
EXPORT CUresult cuEventDestroy_v2(i64* event) { return delete event, --num_events, 0; }
