// A communicator of NCCL whose calls have deadlines.
//
// What calls have queued is known to be done by events, which another thread asks for: `progress`
// says how long the oldest call has been waiting, in NCCL or on the GPU, and `abort` frees both. So
// a rank that never comes is noticed also where this one hangs in a synchronisation. An event costs
// 2 us of the host: there is one for the first call of a burst, and for every 16th. That thread
// calls `mark` for the others.
#pragma once

#include <jitkern/launch.h>

#include <functional>
#include <mutex>
#include <vector>

#include "comm/nccl.h"

namespace jitkern {

// What became of a call; Python makes the errors, which ask the other ranks.
enum CallStatus : int64_t {
  kCallDone,     // queued
  kCallStopped,  // the communicator is closed, or has failed
  kCallLate,     // the deadline has passed in it: of a wait
  kCallFailed,   // see Progress::trouble
  kCallTraced,   // a tracer or a dispatch mode of PyTorch is active
};

class NcclCommunicator {
 public:
  using Queue = std::function<NcclResult(const Nccl&, NcclComm, CUstream)>;

  NcclCommunicator(int ordinal, int rank, int size, double timeout_s);
  // Leaves NCCL's communicator as it is: without `free` or `abort` it ends with the process.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const int ordinal;
  const int rank;
  const int size;

  // Queues a call on torch's current stream; `peer`: of one that only two ranks make, else -1.
  template <class Run>
  CallStatus call(const char* op, int peer, const Run& run) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (is_stopped_) return kCallStopped;
    if (is_broken_) return kCallFailed;
    if (torch_has_to_see_it()) return kCallTraced;
    return run_now(op, peer, std::cref(run));  // no copy of what it holds
  }

  // Makes NCCL's communicator, once all ranks do. It has no deadline: for a thread of its own.
  CallStatus open(const NcclUniqueId& id);
  // What was queued last is done.
  CallStatus wait_done();
  // Waits for all that was queued, and makes no more calls.
  CallStatus finish();
  // Behind `finish`, in a thread of its own: NCCL waits for graphs that have captured it.
  void free();
  // Ends it at once: what waits for other ranks returns. By any thread; waits for graphs, too.
  void abort();
  // Records an event behind the last call, unless a thread is in one. The driver may block in it
  // behind a full launch queue: for a thread of its own.
  void mark();

  // Registers memory for NCCL to read and write without a copy of its own: collective, once.
  CallStatus register_memory(void* memory, size_t bytes);

  // How far the rank is, by any thread.
  struct Progress {
    u64 num_calls = 0;  // that all ranks make
    const char* last_op = "";
    bool is_open = false;   // the last call has no event yet: see `mark`
    double waiting_s = -1;  // since the oldest call that is not done was made; none
    const char* op = "";    // that call, or the last one
    u64 number = 0;
    std::vector<const char*> ops;  // from that call to the next event: which of them it is, if
                                   // the others are ahead of it, this rank does not know
    int peer = -1;                 // of that call
    std::string trouble;           // of NCCL: why a call has failed
    u64 num_captured = 0;
  };
  Progress progress();

 private:
  // Calls that are not done: 32 to 48, then the next one waits for the GPU here. A GPU's launch
  // queue holds 1,024 kernels, of others too, behind which the next one waits inside of NCCL: an
  // abort that comes then takes the CUDA context with it (an illegal access, NCCL 2.28.9).
  static constexpr u64 kStep = 16;
  static constexpr u64 kLog = 128;
  static constexpr u64 kKnown = 64;  // of them, that nobody overwrites while they are read

  enum EntryState {
    kOpen,    // done with the next one that is marked
    kMarked,  // has an event
    kUntold,  // captured: done with those before
  };
  struct Entry {
    std::atomic<const char*> op{""};
    std::atomic<u64> number{0};  // among the calls of all ranks
    std::atomic<double> begin_s{0};
    std::atomic<EntryState> state{kOpen};
    CUevent event = nullptr;
    std::atomic<int> peer{-1};
  };
  CallStatus run_now(const char* op, int peer, const Queue& run);
  CallStatus queue_now(Entry& entry, bool is_capturing, CUstream stream, const Queue& run);
  CallStatus wait_until(CUevent event);
  void mark_now();  // with the turn
  CallStatus failed(const std::string& why);

  Device& device_;
  const double timeout_s_;
  const Nccl& nccl_;
  std::mutex turn_;        // of a call; `abort` and `progress` do not wait for it
  std::timed_mutex used_;  // while NCCL is in a function
  std::atomic<NcclComm> comm_{nullptr};
  std::atomic<bool> is_stopped_{true};  // until it is open
  std::atomic<bool> is_aborted_{false};
  CUstream last_stream_ = nullptr;
  CUevent last_event_ = nullptr;
  u64 last_open_ = 0;    // call that was queued, and not captured
  u64 last_marked_ = 0;  // of them, with an event behind it
  double marked_s_ = -1;
  NcclWindow window_ = nullptr;

  std::array<Entry, kLog> log_;
  std::atomic<u64> num_begun_{0};  // calls of all kinds
  std::atomic<u64> num_queued_{0};
  std::atomic<u64> num_of_all_{0};
  std::atomic<u64> num_captured_{0};
  std::atomic<bool> is_broken_{false};  // a call has failed
  std::mutex asking_;
  u64 num_done_ = 0;  // of all kinds; guarded, as what follows
  std::string trouble_;
};

}  // namespace jitkern
