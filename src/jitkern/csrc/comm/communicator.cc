#include "comm/communicator.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "host/staging.h"

namespace jitkern {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Map;
using tvm::ffi::String;

namespace {

double now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Calls within this time of each other are one burst.
constexpr double kBurstS = 1e-3;

// How long an abort waits for a thread to return from NCCL by itself.
constexpr std::chrono::seconds kWayOut{1};

}  // namespace

NcclCommunicator::NcclCommunicator(int ordinal, int rank, int size, double timeout_s)
    : ordinal(ordinal),
      rank(rank),
      size(size),
      device_(Device::get(ordinal)),
      timeout_s_(timeout_s),
      nccl_(Nccl::get()) {}

NcclCommunicator::~NcclCommunicator() {
  for (const Entry& entry : log_) destroy_event(entry.event);
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
  abort();  // its maker has given up meanwhile
  return kCallStopped;
}

CallStatus NcclCommunicator::failed(const std::string& why) {
  const std::lock_guard<std::mutex> lock(asking_);
  trouble_ = why;
  is_broken_ = true;
  return kCallFailed;
}

CallStatus NcclCommunicator::run_now(const char* op, int peer, const Queue& run) {
  const ContextScope scope(device_);
  const auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, ordinal));
  const bool is_captured = is_capturing(stream);
  // A call of two ranks always has an event: its order among the calls of all ranks is not known.
  const bool begins_burst =
      std::isfinite(timeout_s_) && (peer >= 0 || now_s() - marked_s_ > kBurstS);
  if (!is_captured) {
    const bool has_moved = stream != last_stream_;
    if (has_moved || begins_burst) mark_now();
    if (has_moved && last_event_ != nullptr) wait_for(stream, last_event_);
  }
  const u64 begun = num_begun_.load(std::memory_order_relaxed) + 1;
  if (begun % kStep == 0 && begun > 2 * kStep && !is_captured) {
    const Entry& older = log_[(begun - 2 * kStep) % kLog];
    const CallStatus status = older.state == kMarked ? wait_until(older.event) : kCallDone;
    if (status != kCallDone) return status;
  }
  Entry& entry = log_[begun % kLog];
  entry.op = op;
  entry.peer = peer;
  entry.number = peer < 0 ? ++num_of_all_ : num_of_all_.load();
  entry.begin_s = now_s();
  entry.state = kOpen;
  num_begun_.store(begun, std::memory_order_release);
  try {
    const CallStatus status = queue_now(entry, is_captured, stream, run);
    if (status == kCallDone && !is_captured) {
      last_stream_ = stream;
      last_open_ = begun;
      if (begins_burst || (begun % kStep == 0 && std::isfinite(timeout_s_))) mark_now();
    }
    if (status == kCallDone) num_queued_.store(begun, std::memory_order_release);
    return status;
  } catch (...) {  // an error of the driver: the queued work has no event
    failed(str(op, " has failed, and may have been sent"));
    throw;
  }
}

CallStatus NcclCommunicator::queue_now(Entry& entry, bool is_captured, CUstream stream,
                                       const Queue& run) {
  const std::lock_guard<std::timed_mutex> lock(used_);
  if (is_stopped_) return kCallStopped;
  const NcclResult result = run(nccl_, comm_, stream);
  if (is_stopped_) return kCallStopped;  // aborted meanwhile
  if (result != kNcclSuccess) return failed(nccl_.text_of(result));
  if (is_captured) {
    // It is done when the graph is replayed, which is not seen here.
    ++num_captured_;
    entry.state = kUntold;
  }
  return kCallDone;
}

void NcclCommunicator::mark_now() {
  if (last_open_ <= last_marked_) return;
  Entry& entry = log_[last_open_ % kLog];
  const RelaxedCapture relaxed;
  if (entry.event == nullptr) entry.event = make_event();
  if (!is_capturing(last_stream_)) {
    record(entry.event, last_stream_);
    // Another thread may have begun to capture meanwhile: then the event may not be queried.
    if (!is_capturing(last_stream_)) {
      last_event_ = entry.event;
      entry.state = kMarked;
    }
  }
  // Earlier calls are done before a capture: PyTorch has waited for the GPU.
  for (u64 n = last_marked_ + 1; entry.state == kOpen && n < last_open_; ++n) {
    log_[n % kLog].state = kUntold;
  }
  if (entry.state == kOpen) entry.state = kUntold;
  last_marked_ = last_open_;
  marked_s_ = now_s();
}

void NcclCommunicator::mark() {
  // A thread that holds it is in a call, perhaps for ever, or has marked what it waits for.
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (!turn.owns_lock() || is_stopped_) return;
  const ContextScope scope(device_);
  mark_now();
}

CallStatus NcclCommunicator::wait_done() {
  const std::lock_guard<std::mutex> turn(turn_);
  const ContextScope scope(device_);
  mark_now();
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
  static_cast<void>(lock.try_lock_for(kWayOut));
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
  const std::lock_guard<std::mutex> lock(asking_);
  const u64 begun = num_begun_.load(std::memory_order_acquire);
  const u64 queued = num_queued_.load(std::memory_order_acquire);
  // Older entries are overwritten.
  num_done_ = std::max(num_done_, queued > kKnown ? queued - kKnown : 0);
  for (u64 n = num_done_ + 1; n <= queued; ++n) {
    const Entry& next = log_[n % kLog];
    const EntryState state = next.state;
    if (state == kOpen || (state == kUntold && n != num_done_ + 1)) continue;
    if (state == kMarked && Driver::get().cuEventQuery(next.event) == kCudaErrorNotReady) break;
    num_done_ = n;
  }
  const bool is_waiting = num_done_ < begun;
  const Entry& oldest = log_[(is_waiting ? num_done_ + 1 : begun) % kLog];
  const u64 number = is_waiting ? oldest.number : num_of_all_;
  Array<String> ops;
  for (u64 n = num_done_ + 1; n <= begun && n <= num_done_ + kKnown; ++n) {
    const Entry& later = log_[n % kLog];
    // Calls of two ranks have the number of the call before.
    if (later.number >= number + ops.size()) ops.push_back(String(later.op));
    if (later.state == kMarked) break;
  }
  std::string trouble = trouble_;
  const std::unique_lock<std::timed_mutex> use(used_, std::try_to_lock);
  if (use.owns_lock() && comm_ != nullptr && !is_stopped_) {
    NcclResult state = kNcclSuccess;
    if (nccl_.ncclCommGetAsyncError(comm_, &state) == kNcclSuccess && state != kNcclSuccess) {
      trouble = nccl_.text_of(state);
    }
  }
  return {{"num_calls", static_cast<int64_t>(num_of_all_)},
          {"last_op", String(log_[begun % kLog].op)},
          {"is_open", queued > 0 && log_[queued % kLog].state == kOpen},
          {"waiting_s", is_waiting ? now_s() - oldest.begin_s : -1.0},
          {"op", String(oldest.op)},
          {"number", static_cast<int64_t>(number)},
          {"peer", int64_t{is_waiting ? oldest.peer.load() : -1}},
          {"ops", ops},
          {"trouble", String(trouble)},
          {"num_captured", static_cast<int64_t>(num_captured_)}};
}

}  // namespace jitkern
