// When the iterations of a SlotPipeline were loaded, computed and stored, by events that are read
// once they are over.
#pragma once

#include <jitkern/launch.h>
#include <tvm/ffi/string.h>

#include <array>
#include <chrono>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "host/staging.h"

namespace jitkern {

// What is done to a slot. An iteration of a run is a load and a compute, a compute and a store, or
// all three.
enum SlotAccess : int { kNoAccess = -1, kLoad, kCompute, kStore };

inline void destroy_event(CUevent event) {
  if (event != nullptr) Driver::get().cuEventDestroy_v2(event);
}

// Nothing here waits. On an H200 a timed event costs the host 1.03 us and the GPU 1.6, others 0.22:
// so the first iterations are timed, and then a burst of each period. On the CPU the times are the
// host's.
class SlotTimes {
 public:
  SlotTimes(bool on_gpu, bool all) : on_gpu_(on_gpu), all_timed_(all) {}
  ~SlotTimes() {
    for (const Iteration& iteration : all_) {
      for (const Moment& moment : iteration.moments) destroy_event(moment.event);
    }
  }
  SlotTimes(const SlotTimes&) = delete;
  SlotTimes& operator=(const SlotTimes&) = delete;

  // By the pipeline's thread. A session begins; and a run, whose iterations go from the first
  // access to the last one.
  void begin_session() { is_first_ = true; }
  void begin_run(int first, int last) { first_access_ = first, last_access_ = last; }

  // Before and after what is queued on a stream for an access of a slot.
  void begin(int access, size_t slot, CUstream stream) {
    if (slot >= open_.size()) open_.resize(slot + 1);
    Iteration*& iteration = open_[slot];
    if (access == first_access_) {
      if (iteration == nullptr) iteration = take();  // else it was cut short
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
    if (access != last_access_) return;
    if (!iteration->is_timed) return;
    iteration->slot = slot;
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::exchange(iteration, nullptr));
    if (queue_.size() <= kCapacity) return;
    free_.push_back(queue_.front());
    queue_.pop_front();
    ++num_dropped_;
  }

  // By any thread: a row for each of up to `most` iterations that are over. Begin and end of load,
  // compute and store in milliseconds, NaN where there is none; slot; number, from 1 on; whether it
  // is the first of a session.
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
      rows.push_back(static_cast<double>(iteration.slot));
      rows.push_back(static_cast<double>(iteration.number));
      rows.push_back(iteration.is_first ? 1 : 0);
      queue_.pop_front();
      if (base_ != nullptr) free_.push_back(base_);
      base_ = &iteration;
    }
    return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(double)};
  }

  i64 num_dropped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_dropped_;
  }

 private:
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  static constexpr size_t kCapacity = 1024;  // iterations that wait to be read
  static constexpr i64 kBurst = 32, kPeriod = 256;

  // A place in the work of a stream; on the CPU a time.
  struct Moment {
    CUevent event = nullptr;  // made when it is first recorded
    double ms = 0;            // of an event: once it has been read
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

  // Times go on from the iteration before: a float of milliseconds is exact to 1 us up to 8 s.
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
  // Of the pipeline's thread.
  std::vector<Iteration*> open_;  // by slot
  i64 num_begun_ = 0;
  bool is_first_ = false;
  int first_access_ = kLoad, last_access_ = kCompute;

  std::mutex mutex_;  // of the rest
  std::deque<Iteration> all_;
  std::vector<Iteration*> free_;
  std::deque<Iteration*> queue_;
  Iteration* base_ = nullptr;  // the last that was read
  i64 num_dropped_ = 0;
};

}  // namespace jitkern
