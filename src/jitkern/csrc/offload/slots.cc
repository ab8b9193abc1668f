// The streams and events of a SlotPipeline. Each use of a slot waits for the use before it, on
// whatever stream that was: one wait and one record for each use.
#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "host/method.h"
#include "host/staging.h"
#include "offload/slot_times.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

// Of one pipeline: a stream for each kind of access. One thread at a time, but for `harvest`. On
// the CPU, `ordinal` -1, there are no streams, and `next` only takes times.
class SlotStreams {
 public:
  SlotStreams(int64_t ordinal, const Array<int64_t>& streams, bool is_timed, bool all_timed)
      : device_(ordinal < 0 ? nullptr : &Device::get(static_cast<int>(ordinal))) {
    if (is_timed) times_ = std::make_unique<SlotTimes>(device_ != nullptr, all_timed);
    if (device_ == nullptr) return;
    const ContextScope scope(*device_);
    const RelaxedCapture relaxed;
    forked_ = make_event();
    for (size_t access = 0; access < lanes_.size(); ++access) {
      lanes_[access].stream = reinterpret_cast<CUstream>(streams[static_cast<i64>(access)]);
      lanes_[access].joined = make_event();
    }
  }

  ~SlotStreams() {
    if (getpid() != owner_) {  // a forked child, in which the driver is not to be asked
      static_cast<void>(times_.release());
      return;
    }
    destroy_event(forked_);
    for (const Lane& lane : lanes_) destroy_event(lane.joined);
    for (const Slot& slot : slots_) {
      destroy_event(slot.eager.ended);
      destroy_event(slot.captured.ended);
    }
  }

  SlotStreams(const SlotStreams&) = delete;
  SlotStreams& operator=(const SlotStreams&) = delete;

  // A slot whose memory the compute stream has allocated: other work there may still use it.
  void add_slot(size_t index) {
    if (index >= slots_.size()) slots_.resize(index + 1);
    const Scope scope(device_);
    end_use(slots_[index].eager, lanes_[kCompute]);
  }

  // Begins a session, after all work on the caller's stream; returns whether that is captured.
  bool enter(i64 caller) {
    ++session_;
    caller_ = reinterpret_cast<CUstream>(caller);
    if (times_) times_->begin_session();
    if (device_ == nullptr) return false;
    const Scope scope(device_);
    is_capturing_ = is_capturing(caller_);
    record(forked_, caller_);
    for (Lane& lane : lanes_) lane.is_forked = lane.is_used = false;
    use(lanes_[kCompute]);
    return is_capturing_;
  }

  // Begins a run whose iterations go from the first access to the last one.
  void start(int first_access, int last_access) {
    if (times_) times_->begin_run(first_access, last_access);
  }

  // Ends the access that is open, and begins one unless it is kNoAccess.
  void next(int access, size_t index) {
    const Scope scope(device_);
    if (const auto [chain, opened, slot] = std::exchange(open_, Open()); chain != nullptr) {
      Lane& lane = lanes_[static_cast<size_t>(opened)];
      if (is_timed()) times_->end(opened, slot, lane.stream);
      end_use(*chain, lane);
    }
    if (access != kNoAccess) begin(access, index);
  }

  // Later transfers wait for all work on the compute stream.
  void fork() {
    if (device_ == nullptr) return;
    const Scope scope(device_);
    record(forked_, lanes_[kCompute].stream);
    lanes_[kLoad].is_forked = lanes_[kStore].is_forked = false;
  }

  // Ends the session: the caller's stream waits for all of it, even if a part of it failed.
  void leave() {
    if (device_ == nullptr) return;
    const Scope scope(device_);
    const Driver& driver = Driver::get();
    CUresult failed = kCudaSuccess;
    const auto note = [&](CUresult result) { failed = failed == kCudaSuccess ? result : failed; };
    for (Lane& lane : lanes_) {
      if (!std::exchange(lane.is_used, false) || lane.stream == caller_) continue;
      note(driver.cuEventRecord(lane.joined, lane.stream));
      note(driver.cuStreamWaitEvent(caller_, lane.joined, 0));
    }
    driver.check(failed, "SlotPipeline: the caller's stream could not wait");
  }

  // As of SlotTimes, by any thread.
  tvm::ffi::Bytes harvest(i64 most) {
    const Scope scope(device_);
    return times_->harvest(most);
  }

  i64 num_dropped() { return times_->num_dropped(); }

 private:
  struct Lane {
    CUstream stream = nullptr;
    CUevent joined = nullptr;
    bool is_forked = false;  // it waits for what the session, or the last fork, waits for
    bool is_used = false;
  };
  // The uses of a slot, each of which waits for the one before it. Captures have chains of their
  // own: what one records only the same capture can wait for.
  struct Chain {
    CUevent ended = nullptr;
    Lane* lane = nullptr;  // of the last use; none yet
    u64 session = 0;
  };
  struct Slot {
    Chain eager;
    Chain captured;
  };
  struct Open {
    Chain* chain = nullptr;
    int access = kNoAccess;
    size_t slot = 0;
  };
  // Makes the pipeline's device the current one.
  struct Scope {
    explicit Scope(const Device* device) {
      if (device != nullptr) on_gpu.emplace(*device);
    }
    std::optional<ContextScope> on_gpu;
  };

  bool is_timed() const { return times_ != nullptr && !is_capturing_; }

  void use(Lane& lane) {
    if (lane.is_forked || device_ == nullptr) return;
    wait_for(lane.stream, forked_);
    lane.is_forked = lane.is_used = true;
  }

  void begin(int access, size_t index) {
    Slot& slot = slots_.at(index);
    Chain& chain = is_capturing_ ? slot.captured : slot.eager;
    Lane& lane = lanes_[static_cast<size_t>(access)];
    use(lane);
    const bool is_known = chain.lane != nullptr && (!is_capturing_ || chain.session == session_);
    if (is_known && chain.lane != &lane && device_ != nullptr) wait_for(lane.stream, chain.ended);
    if (is_timed()) times_->begin(access, index, lane.stream);
    open_ = {&chain, access, index};
  }

  void end_use(Chain& chain, Lane& lane) {
    chain.lane = &lane;
    chain.session = session_;
    if (device_ == nullptr) return;
    if (chain.ended == nullptr) {
      const RelaxedCapture relaxed;
      chain.ended = make_event();
    }
    record(chain.ended, lane.stream);
  }

  Device* const device_;  // none on the CPU
  const pid_t owner_ = getpid();
  std::array<Lane, 3> lanes_;  // by access
  std::deque<Slot> slots_;
  CUevent forked_ = nullptr;
  CUstream caller_ = nullptr;
  bool is_capturing_ = false;
  u64 session_ = 0;
  Open open_;
  std::unique_ptr<SlotTimes> times_;
};

// next, enter, start, fork, leave, add_slot, harvest and num_dropped of streams, given by access.
Array<Function> make_slot_streams(int64_t ordinal, const Array<int64_t>& streams, bool is_timed,
                                  bool all_timed) {
  const auto made = std::make_shared<SlotStreams>(ordinal, streams, is_timed, all_timed);
  return {method(made, &SlotStreams::next),    method(made, &SlotStreams::enter),
          method(made, &SlotStreams::start),   method(made, &SlotStreams::fork),
          method(made, &SlotStreams::leave),   method(made, &SlotStreams::add_slot),
          method(made, &SlotStreams::harvest), method(made, &SlotStreams::num_dropped)};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_slot_streams, make_slot_streams);

}  // namespace jitkern
