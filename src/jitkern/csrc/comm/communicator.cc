#include "comm/communicator.h"

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "host/staging.h"

namespace jitkern {

using tvm::ffi::Any;
using tvm::ffi::Map;
using tvm::ffi::String;

namespace {

double now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// How long an abort waits for a thread to return from NCCL by itself.
constexpr std::chrono::seconds kAbortGrace{1};

}  // namespace

NcclCommunicator::NcclCommunicator(int ordinal, int rank, int size, double timeout_s)
    : ordinal(ordinal),
      rank(rank),
      size(size),
      device_(Device::get(ordinal)),
      timeout_s_(timeout_s),
      nccl_(Nccl::get()) {}

NcclCommunicator::~NcclCommunicator() {
  forget_oldest(pending_.size());
  for (const CUevent event : free_events_) destroy_event(event);
}

CallStatus NcclCommunicator::open(const tvm::ffi::Bytes& unique_id) {
  const ContextScope scope(device_);
  NcclUniqueId id{};
  std::copy_n(unique_id.data(), std::min(unique_id.size(), sizeof(id.bytes)), id.bytes);
  NcclConfig config;
  NcclComm comm = nullptr;
  const NcclResult result = nccl_.ncclCommInitRankConfig(&comm, size, id, rank, &config);
  if (result != kNcclSuccess) return failed(nccl_.text_of(result));
  comm_ = comm;
  is_stopped_ = false;
  if (!is_aborted_) return kCallDone;
  abort();  // the thread that made it has given up meanwhile
  return kCallStopped;
}

CallStatus NcclCommunicator::failed(const std::string& why) {
  const std::lock_guard<std::mutex> lock(log_);
  error_ = why;
  is_broken_ = true;
  return kCallFailed;
}

CallStatus NcclCommunicator::call(const char* op, int peer, const Queue& run) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (is_stopped_) return kCallStopped;
  if (is_broken_) return kCallFailed;
  refuse_tracers(op);
  const ContextScope scope(device_);
  const auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, ordinal));
  const bool is_captured = is_capturing(stream);
  if (!is_captured) {
    const CallStatus status = wait_for_room();
    if (status != kCallDone) return status;
    if (last_event_ != nullptr && stream != last_stream_) wait_for(stream, last_event_);
  }
  {
    const std::lock_guard<std::mutex> lock(log_);
    if (peer < 0) ++num_calls_;
    last_op_ = op;
    pending_.push_back({op, num_calls_, peer, now_s(), nullptr});
  }
  try {
    const CallStatus status = queue_now(stream, run);
    if (status != kCallDone) return status;
    const CUevent event = is_captured ? nullptr : record_event(stream);
    const std::lock_guard<std::mutex> lock(log_);
    if (is_captured) {
      // It runs when the graph is replayed, which is not seen here.
      ++num_captured_;
      pending_.pop_back();
    } else {
      pending_.back().event = event;
    }
    return kCallDone;
  } catch (...) {  // an error of the driver: the queued work has no event
    failed(str(op, " has failed, and may have been sent"));
    throw;
  }
}

CallStatus NcclCommunicator::queue_now(CUstream stream, const Queue& run) {
  const std::lock_guard<std::timed_mutex> lock(used_);
  if (is_stopped_) return kCallStopped;
  const NcclResult result = run(nccl_, comm_, stream);
  if (is_stopped_) return kCallStopped;  // aborted meanwhile
  return result == kNcclSuccess ? kCallDone : failed(nccl_.text_of(result));
}

CallStatus NcclCommunicator::wait_for_room() {
  CUevent event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(log_);
    if (pending_.size() < kMostPending) return kCallDone;
    event = pending_[kStep - 1].event;
  }
  const CallStatus status = wait_until(event);
  if (status != kCallDone) return status;
  const std::lock_guard<std::mutex> lock(log_);
  // `progress` may have forgotten them meanwhile.
  if (pending_.size() == kMostPending) forget_oldest(kStep);
  return kCallDone;
}

CUevent NcclCommunicator::record_event(CUstream stream) {
  CUevent event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(log_);
    if (!free_events_.empty()) {
      event = free_events_.back();
      free_events_.pop_back();
    }
  }
  const RelaxedCapture relaxed;
  if (event == nullptr) event = make_event();
  record(event, stream);
  last_event_ = event;
  last_stream_ = stream;
  return event;
}

void NcclCommunicator::forget_oldest(size_t count) {
  for (; count > 0; --count) {
    const CUevent event = pending_.front().event;
    if (event != nullptr) free_events_.push_back(event);
    pending_.pop_front();
  }
}

CallStatus NcclCommunicator::wait_done() {
  const std::lock_guard<std::mutex> turn(turn_);
  const ContextScope scope(device_);
  if (last_event_ != nullptr) return wait_until(last_event_);
  return is_stopped_ ? kCallStopped : kCallDone;
}

// The device's context is current.
CallStatus NcclCommunicator::wait_until(CUevent event) {
  const double limit_s = now_s() + timeout_s_;
  const RelaxedCapture relaxed;
  for (int us = 4; !is_done(event); us = std::min(2 * us, 1000)) {
    if (is_stopped_) return kCallStopped;
    if (now_s() > limit_s) return kCallLate;
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (us == 1000 && TVMFFIEnvCheckSignals() != 0) throw tvm::ffi::EnvErrorAlreadySet();
  }
  return is_stopped_ ? kCallStopped : kCallDone;
}

CallStatus NcclCommunicator::finish() {
  const CallStatus status = wait_done();
  if (status != kCallDone) return status;
  return is_stopped_.exchange(true) ? kCallStopped : kCallDone;
}

void NcclCommunicator::free() {
  const ContextScope scope(device_);
  NcclComm comm = nullptr;
  {
    const std::lock_guard<std::timed_mutex> lock(used_);
    comm = comm_.exchange(nullptr);
    if (comm == nullptr) return;
    // Errors are ignored: NCCL frees the memory a moment later.
    if (window_ != nullptr) nccl_.ncclCommWindowDeregister(comm, std::exchange(window_, nullptr));
  }
  nccl_.check(nccl_.ncclCommFinalize(comm), "ncclCommFinalize");
  nccl_.check(nccl_.ncclCommDestroy(comm), "ncclCommDestroy");
}

void NcclCommunicator::abort() {
  is_aborted_ = true;
  is_stopped_ = true;
  const ContextScope scope(device_);
  const RelaxedCapture relaxed;
  // Kernels that wait for missing ranks end within 4 ms each, and NCCL waits for them. A thread
  // that is connecting to missing ranks in NCCL returns too, as with PyTorch's watchdog.
  std::unique_lock<std::timed_mutex> lock(used_, std::defer_lock);
  static_cast<void>(lock.try_lock_for(kAbortGrace));
  const NcclComm comm = comm_.exchange(nullptr);
  if (comm != nullptr) nccl_.ncclCommAbort(comm);
}

CallStatus NcclCommunicator::register_memory(i64 address, size_t bytes) {
  return call("init_pynccl", -1, [=](const Nccl& nccl, NcclComm comm, CUstream) {
    return nccl.ncclCommWindowRegister(comm, reinterpret_cast<void*>(address), bytes, &window_,
                                       kNcclSymmetricWindow);
  });
}

Map<String, Any> NcclCommunicator::progress() {
  const ContextScope scope(device_);
  const RelaxedCapture relaxed;
  const std::lock_guard<std::mutex> lock(log_);
  while (!pending_.empty()) {
    const CUevent event = pending_.front().event;
    if (event == nullptr || Driver::get().cuEventQuery(event) == kCudaErrorNotReady) break;
    forget_oldest(1);
  }
  std::string error = error_;
  const std::unique_lock<std::timed_mutex> use(used_, std::try_to_lock);
  if (use.owns_lock() && comm_ != nullptr && !is_stopped_) {
    NcclResult result = kNcclSuccess;
    if (nccl_.ncclCommGetAsyncError(comm_, &result) == kNcclSuccess && result != kNcclSuccess) {
      error = nccl_.text_of(result);
    }
  }
  const bool is_waiting = !pending_.empty();
  const PendingCall oldest =
      is_waiting ? pending_.front() : PendingCall{last_op_, num_calls_, -1, 0, nullptr};
  return {{"num_calls", static_cast<int64_t>(num_calls_)},
          {"last_op", String(last_op_)},
          {"waiting_s", is_waiting ? now_s() - oldest.begin_s : -1.0},
          {"op", String(oldest.op)},
          {"number", static_cast<int64_t>(oldest.number)},
          {"peer", int64_t{oldest.peer}},
          {"error", String(error)},
          {"num_captured", static_cast<int64_t>(num_captured_)}};
}

}  // namespace jitkern
