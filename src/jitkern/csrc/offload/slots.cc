// The streams and events of a SlotPipeline. Each use of a slot waits for the slot's previous use on
// any stream: one wait and one record per use. Optionally times the uses.
#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "host/objects.h"
#include "host/staging.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

// How a slot is used. An iteration is a load and a compute, a compute and a store, or all three.
enum SlotAccess : int { kNoAccess = -1, kLoad, kCompute, kStore };

// The times of iterations, from events that are read after they complete; nothing here waits. On an
// H200 a timed event costs the host 1.03 us and the GPU 1.6, an untimed one 0.22. So the first
// iterations are timed, then a burst per period. On the CPU the times are the host's.
class SlotTimes {
 public:
  SlotTimes(bool on_gpu, bool all) : on_gpu_(on_gpu), all_timed_(all) {}
  ~SlotTimes() {
    for (const Iteration& iteration : all_) {
      for (const Moment& moment : iteration.moments) destroy_event(moment.event);
    }
  }

  // Called by the pipeline's thread. An iteration of the run starts with an access of kind `first`
  // and ends with one of kind `last`.
  void begin_session() { is_first_ = true; }
  void begin_run(int first, int last) { first_access_ = first, last_access_ = last; }

  // Called before and after the work of an access is queued on its stream.
  void begin(int access, size_t slot, CUstream stream) {
    if (slot >= open_.size()) open_.resize(slot + 1);
    Iteration*& iteration = open_[slot];
    if (access == first_access_) {
      if (iteration == nullptr) iteration = take();  // otherwise an exception ended the last one
      iteration->has = {};
      iteration->is_first = false;
      iteration->is_timed = all_timed_ || num_begun_ < 2 * kBurst || num_begun_ % kPeriod < kBurst;
      iteration->number = ++num_begun_;
    }
    if (access == kCompute) iteration->is_first = std::exchange(is_first_, false);
    if (iteration->is_timed) mark(iteration->moments[begin_of(access)], stream);
  }
  void end(int access, size_t slot, CUstream stream) {
    Iteration*& iteration = open_[slot];
    if (iteration->is_timed) mark(iteration->moments[begin_of(access) + 1], stream);
    iteration->has[static_cast<size_t>(access)] = true;
    if (access != last_access_ || !iteration->is_timed) return;
    iteration->slot = slot;
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::exchange(iteration, nullptr));
    if (queue_.size() <= kCapacity) return;
    free_.push_back(queue_.front());
    queue_.pop_front();
  }

  // Called by any thread. Returns a row for each of up to `most` completed iterations: begin and
  // end of load, compute and store in milliseconds, NaN for an absent access; slot; number, from 1;
  // whether it is the session's first.
  tvm::ffi::Bytes harvest(i64 most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<RelaxedCapture> relaxed;  // another thread may be capturing
    if (on_gpu_) relaxed.emplace();
    std::vector<double> rows;
    for (; most > 0 && !queue_.empty(); --most) {
      Iteration& iteration = *queue_.front();
      const int last = iteration.has[kStore] ? kStore : kCompute;
      if (on_gpu_ && !is_done(iteration.moments[begin_of(last) + 1].event)) break;
      if (on_gpu_) read(iteration);
      for (size_t i = 0; i < iteration.moments.size(); ++i) {
        rows.push_back(iteration.has[i / 2] ? iteration.moments[i].ms : kNone);
      }
      const auto slot = static_cast<double>(iteration.slot);
      rows.insert(rows.end(), {slot, double(iteration.number), double(iteration.is_first)});
      queue_.pop_front();
      if (base_ != nullptr) free_.push_back(base_);
      base_ = &iteration;
    }
    return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(double)};
  }

 private:
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  static constexpr size_t kCapacity = 1024;  // unread iterations; older ones are dropped
  static constexpr i64 kBurst = 32, kPeriod = 256;

  struct Moment {
    CUevent event = nullptr;  // made when it is first recorded; none on the CPU
    double ms = 0;            // set by `read` on a GPU
  };
  struct Iteration {
    i64 number = 0;
    size_t slot = 0;
    bool is_first = false;
    bool is_timed = true;
    std::array<bool, 3> has{};
    std::array<Moment, 6> moments;  // begin and end of each access
  };

  static size_t begin_of(int access) { return 2 * static_cast<size_t>(access); }

  Iteration* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) free_.push_back(&all_.emplace_back());
    Iteration* const iteration = free_.back();
    free_.pop_back();
    return iteration;
  }

  void mark(Moment& moment, CUstream stream) {
    if (!on_gpu_) {
      using Milliseconds = std::chrono::duration<double, std::milli>;
      moment.ms = Milliseconds(std::chrono::steady_clock::now() - origin_).count();
      return;
    }
    if (moment.event == nullptr) {
      const RelaxedCapture relaxed;
      JITKERN_CU(cuEventCreate, &moment.event, 0);
    }
    record(moment.event, stream);
  }

  // Times are measured from the previous iteration: a float of milliseconds is exact to 1 us up to
  // 8 s only.
  void read(Iteration& iteration) const {
    const auto after = [](const Moment& from, CUevent event) {
      float ms = 0;
      JITKERN_CU(cuEventElapsedTime, &ms, from.event, event);
      return from.ms + ms;
    };
    Moment& first = iteration.moments[begin_of(iteration.has[kLoad] ? kLoad : kCompute)];
    first.ms = base_ == nullptr ? 0 : after(base_->moments[begin_of(kCompute) + 1], first.event);
    for (size_t i = 0; i < iteration.moments.size(); ++i) {
      Moment& moment = iteration.moments[i];
      if (iteration.has[i / 2] && &moment != &first) moment.ms = after(first, moment.event);
    }
  }

  const bool on_gpu_, all_timed_;
  const std::chrono::steady_clock::time_point origin_ = std::chrono::steady_clock::now();
  // Used by the pipeline's thread alone.
  std::vector<Iteration*> open_;  // by slot
  i64 num_begun_ = 0;
  bool is_first_ = false;
  int first_access_ = kLoad, last_access_ = kCompute;

  std::mutex mutex_;  // guards the following
  std::deque<Iteration> all_;
  std::vector<Iteration*> free_;
  std::deque<Iteration*> queue_;
  Iteration* base_ = nullptr;  // the iteration read last
};

// A pipeline's streams, one per kind of access. Used by one thread at a time, except `harvest`. On
// the CPU (`ordinal` -1) there are no streams, and `next` only takes times.
class SlotStreams {
 public:
  SlotStreams(int ordinal, const Array<int64_t>& streams, bool is_timed, bool all_timed)
      : device_(ordinal < 0 ? nullptr : &Device::get(ordinal)) {
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
    if (getpid() != owner_) {  // in a forked child the driver may not be called
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

  // Adds a slot. Its memory comes from the compute stream, where earlier work may still use it.
  void add_slot(size_t index) {
    if (index >= slots_.size()) slots_.resize(index + 1);
    const Scope scope(device_);
    end_use(slots_[index].eager, lanes_[kCompute]);
  }

  // Begins a session after all work on the caller's stream. Returns whether the stream is captured.
  bool enter(i64 caller) {
    ++session_;
    caller_ = reinterpret_cast<CUstream>(caller);
    if (times_) times_->begin_session();
    if (device_ == nullptr) return false;
    const Scope scope(device_);
    is_capturing_ = is_capturing(caller_);
    record(forked_, caller_);
    for (Lane& lane : lanes_) lane.has_waited = lane.is_used = false;
    use(lanes_[kCompute]);
    return is_capturing_;
  }

  void start(int first_access, int last_access) {
    if (times_) times_->begin_run(first_access, last_access);
  }

  // Ends the current access, and begins another unless it is kNoAccess.
  void next(int access, size_t index) {
    const Scope scope(device_);
    if (const auto [chain, ended, slot] = std::exchange(current_, Current()); chain != nullptr) {
      Lane& lane = lanes_[static_cast<size_t>(ended)];
      if (is_timed()) times_->end(ended, slot, lane.stream);
      end_use(*chain, lane);
    }
    if (access != kNoAccess) begin(access, index);
  }

  // Makes later transfers wait for all work on the compute stream.
  void fork() {
    if (device_ == nullptr) return;
    const Scope scope(device_);
    record(forked_, lanes_[kCompute].stream);
    lanes_[kLoad].has_waited = lanes_[kStore].has_waited = false;
  }

  // Ends the session: the caller's stream waits for every stream used, even if a wait fails.
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

  // See SlotTimes; called by any thread.
  tvm::ffi::Bytes harvest(i64 most) {
    const Scope scope(device_);
    return times_->harvest(most);
  }

 private:
  struct Lane {
    CUstream stream = nullptr;
    CUevent joined = nullptr;
    bool has_waited = false;  // for the session's begin or the last fork
    bool is_used = false;
  };
  // The uses of a slot; each waits for the previous one. Captures have their own chains: an event
  // recorded in a capture can be waited for in this capture only.
  struct Chain {
    CUevent ended = nullptr;
    Lane* lane = nullptr;  // the last use's
    u64 session = 0;
  };
  struct Slot {
    Chain eager;
    Chain captured;
  };
  struct Current {
    Chain* chain = nullptr;
    int access = kNoAccess;
    size_t slot = 0;
  };
  // Makes the pipeline's device current.
  struct Scope {
    explicit Scope(const Device* device) {
      if (device != nullptr) on_gpu.emplace(*device);
    }
    std::optional<ContextScope> on_gpu;
  };

  bool is_timed() const { return times_ != nullptr && !is_capturing_; }

  void use(Lane& lane) {
    if (lane.has_waited || device_ == nullptr) return;
    wait_for(lane.stream, forked_);
    lane.has_waited = lane.is_used = true;
  }

  void begin(int access, size_t index) {
    Slot& slot = slots_.at(index);
    Chain& chain = is_capturing_ ? slot.captured : slot.eager;
    Lane& lane = lanes_[static_cast<size_t>(access)];
    use(lane);
    const bool is_known = chain.lane != nullptr && (!is_capturing_ || chain.session == session_);
    if (is_known && chain.lane != &lane && device_ != nullptr) wait_for(lane.stream, chain.ended);
    if (is_timed()) times_->begin(access, index, lane.stream);
    current_ = {&chain, access, index};
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
  Current current_;
  std::unique_ptr<SlotTimes> times_;
};

// Returns next, enter, start, fork, leave, add_slot and harvest. `streams` are indexed by access.
Array<Function> make_slot_streams(int ordinal, const Array<int64_t>& streams, bool is_timed,
                                  bool all_timed) {
  const auto slots = std::make_shared<SlotStreams>(ordinal, streams, is_timed, all_timed);
  return {method(slots, &SlotStreams::next),   method(slots, &SlotStreams::enter),
          method(slots, &SlotStreams::start),  method(slots, &SlotStreams::fork),
          method(slots, &SlotStreams::leave),  method(slots, &SlotStreams::add_slot),
          method(slots, &SlotStreams::harvest)};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_slot_streams, make_slot_streams);

}  // namespace jitkern
