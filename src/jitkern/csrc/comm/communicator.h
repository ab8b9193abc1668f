// An NCCL communicator whose calls have deadlines.
//
// Events tell which calls are done. A Python thread calls `progress`, which tells how long the
// oldest call has waited in NCCL or on the GPU, and `abort`, which ends both waits. So a missing
// rank is noticed even while this rank hangs in a synchronisation. An event costs 2 us of host
// time: the first call of a burst and every 16th have one; the Python thread calls `mark` for the
// others.
#pragma once

#include <jitkern/launch.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <functional>
#include <mutex>

#include "comm/nccl.h"
#include "comm/operand.h"

namespace jitkern {

// The outcome of a call. Python raises the errors, which name other ranks.
enum CallStatus : int64_t {
  kCallDone,     // queued
  kCallStopped,  // the communicator is closed, or has failed
  kCallLate,     // the deadline of a wait has passed
  kCallFailed,   // see `progress`
};

class NcclCommunicator {
 public:
  using Queue = std::function<NcclResult(const Nccl&, NcclComm, CUstream)>;

  NcclCommunicator(int ordinal, int rank, int size, double timeout_s);
  // Does not end NCCL's communicator, as `free` and `abort` do.
  ~NcclCommunicator();

  const int ordinal;
  const int rank;
  const int size;

  // Queues a call on torch's current stream. `peer` is the other rank if only two take part, else
  // -1.
  template <class Run>
  CallStatus call(const char* op, int peer, const Run& run) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (is_stopped_) return kCallStopped;
    if (is_broken_) return kCallFailed;
    refuse_tracers(op);
    return run_now(op, peer, std::cref(run));  // without a copy
  }

  // Makes NCCL's communicator; collective. It has no deadline: call it in a thread of its own.
  CallStatus open(const tvm::ffi::Bytes& unique_id);
  // Waits until the last call is done.
  CallStatus wait_done();
  // Waits for all calls, and refuses further ones.
  CallStatus finish();
  // Call it after `finish`, in a thread of its own: NCCL waits for graphs that have captured it.
  void free();
  // Called by any thread. Calls that wait for other ranks return. Waits for graphs.
  void abort();
  // Records an event after the last call, unless a thread is in a call. Call it in a thread of its
  // own: the driver may block if the launch queue is full.
  void mark();

  // Registers memory, which NCCL then accesses without a copy. Collective; call it once.
  CallStatus register_memory(i64 address, size_t bytes);

  // How far this rank is; called by any thread:
  //   num_calls, last_op   of the calls that all ranks make
  //   is_open              the last call has no event yet: see `mark`
  //   waiting_s            the age of the oldest call that is not done; -1 if there is none
  //   op, number, peer     of that call, or the last one
  //   ops                  the calls from that one to the next event: one of them is that call
  //   trouble              NCCL's error
  //   num_captured         calls in graphs
  tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any> progress();

 private:
  // At most 32 to 48 calls are pending; the next one waits here. A GPU's launch queue holds 1,024
  // kernels. If it is full, a call waits inside NCCL, and an abort destroys the CUDA context (an
  // illegal access, NCCL 2.28.9).
  static constexpr u64 kStep = 16;
  static constexpr u64 kLog = 128;
  static constexpr u64 kKnown = 64;  // entries that are read; later calls overwrite others

  enum EntryState {
    kOpen,    // counts as done with the next marked call
    kMarked,  // has an event
    kUntold,  // captured: counts as done with the calls before
  };
  struct Entry {
    std::atomic<const char*> op{""};
    std::atomic<u64> number{0};  // among the calls that all ranks make
    std::atomic<double> begin_s{0};
    std::atomic<EntryState> state{kOpen};
    CUevent event = nullptr;
    std::atomic<int> peer{-1};
  };
  CallStatus run_now(const char* op, int peer, const Queue& run);
  CallStatus queue_now(Entry& entry, bool is_captured, CUstream stream, const Queue& run);
  CallStatus wait_until(CUevent event);
  void mark_now();  // `turn_` is held
  CallStatus failed(const std::string& why);

  Device& device_;
  const double timeout_s_;
  const Nccl& nccl_;
  std::mutex turn_;        // held by a call; `abort` and `progress` do not wait for it
  std::timed_mutex used_;  // held while NCCL is called
  std::atomic<NcclComm> comm_{nullptr};
  std::atomic<bool> is_stopped_{true};  // until it is open
  std::atomic<bool> is_aborted_{false};
  CUstream last_stream_ = nullptr;
  CUevent last_event_ = nullptr;
  u64 last_open_ = 0;    // the last call that was not captured
  u64 last_marked_ = 0;  // the last of these with an event
  double marked_s_ = -1;
  NcclWindow window_ = nullptr;

  std::array<Entry, kLog> log_;
  std::atomic<u64> num_begun_{0};  // calls of all kinds
  std::atomic<u64> num_queued_{0};
  std::atomic<u64> num_of_all_{0};
  std::atomic<u64> num_captured_{0};
  std::atomic<bool> is_broken_{false};  // a call has failed
  std::mutex asking_;                   // guards the following
  u64 num_done_ = 0;                    // of all kinds
  std::string trouble_;
};

}  // namespace jitkern
