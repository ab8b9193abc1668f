// An NCCL communicator whose calls have deadlines.
//
// An event is recorded after each call (2 us of host time). A Python thread calls `progress`, which
// tells how long the oldest call has waited in NCCL or on the GPU, and `abort`, which ends both
// waits. So a missing rank is noticed even if this rank's host hangs in a synchronisation.
#pragma once

#include <jitkern/launch.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <deque>
#include <functional>
#include <mutex>
#include <vector>

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
  // Does not end NCCL's communicator: `free` and `abort` do.
  ~NcclCommunicator();

  const int ordinal;
  const int rank;
  const int size;

  // Queues a call on torch's current stream. `peer` is the other rank of a send or recv, else -1.
  CallStatus call(const char* op, int peer, const Queue& run);

  // Makes NCCL's communicator; collective. It has no deadline: call it in a thread of its own.
  CallStatus open(const tvm::ffi::Bytes& unique_id);
  // Waits until the last call is done.
  CallStatus wait_done();
  // Waits for all calls, and refuses further ones.
  CallStatus finish();
  // Call it after `finish`, in a thread of its own: NCCL waits for graphs that have captured it.
  void free();
  // Makes calls that wait for other ranks return. Any thread may call it. Waits for graphs.
  void abort();

  // Registers memory, which NCCL then accesses without a copy. Collective; call it once.
  CallStatus register_memory(i64 address, size_t bytes);

  // The progress of this rank. Any thread may call it.
  //   num_calls, last_op   the calls that all ranks make
  //   waiting_s            the age of the oldest call that is not done; -1 if there is none
  //   op, number, peer     that call, or the last one
  //   error                NCCL's error, or empty
  //   num_captured         calls in graphs
  tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any> progress();

 private:
  // At most 48 calls are pending; the next one waits until 16 are done. A GPU's launch queue holds
  // 1,024 kernels. If it is full, a call waits inside NCCL, and an abort destroys the CUDA context
  // (an illegal access, NCCL 2.28.9).
  static constexpr size_t kMostPending = 48;
  static constexpr size_t kStep = 16;

  struct PendingCall {
    const char* op;
    u64 number;  // among the calls that all ranks make; a send or recv has that of the one before
    int peer;
    double begin_s;
    CUevent event;  // recorded after the call; null while NCCL queues it
  };

  CallStatus queue_now(CUstream stream, const Queue& run);
  CallStatus wait_for_room();
  CallStatus wait_until(CUevent event);
  CUevent record_event(CUstream stream);
  void forget_oldest(size_t count);  // `log_` is held
  CallStatus failed(const std::string& why);

  Device& device_;
  const double timeout_s_;
  const Nccl& nccl_;
  std::mutex turn_;        // held by a call; `abort` and `progress` do not wait for it
  std::timed_mutex used_;  // held while NCCL is called
  std::atomic<NcclComm> comm_{nullptr};
  std::atomic<bool> is_stopped_{true};  // until it is open
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_broken_{false};  // a call has failed
  CUstream last_stream_ = nullptr;
  CUevent last_event_ = nullptr;
  NcclWindow window_ = nullptr;

  std::mutex log_;                    // guards the following
  std::deque<PendingCall> pending_;   // the oldest first: calls are done in their order
  std::vector<CUevent> free_events_;  // only calls take one, so a recorded event is not reused
  u64 num_calls_ = 0;                 // that all ranks make
  u64 num_captured_ = 0;
  const char* last_op_ = "";
  std::string error_;
};

}  // namespace jitkern
