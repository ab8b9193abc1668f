// How long the iterations of a SlotPipeline take, from events that are read when they are over.
#pragma once

#include <jitkern/launch.h>

#include <algorithm>
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
constexpr size_t kNumAccesses = 3;

inline void destroy_event(CUevent event) {
  if (event != nullptr) Driver::get().cuEventDestroy_v2(event);
}

// Nothing here waits. One iteration in `every` is timed, in bursts: to know what an iteration
// waited for takes the times of the one before it, and of the last store of its slot. Without these
// there is no row. On an H200 a timed event costs the host 1.03 us and the GPU 1.6, others 0.22.
class SlotTimes {
 public:
  // On the CPU the times are the host's. At most `capacity` iterations wait for their harvest; then
  // the oldest are dropped.
  SlotTimes(bool on_gpu, i64 capacity, i64 every)
      : on_gpu_(on_gpu), capacity_(capacity), every_(static_cast<u64>(every)) {}
  ~SlotTimes() {
    for (const Iteration& iteration : all_) {
      for (const Moment& moment : iteration.begin) destroy_event(moment.event);
      for (const Moment& moment : iteration.end) destroy_event(moment.event);
    }
  }
  SlotTimes(const SlotTimes&) = delete;
  SlotTimes& operator=(const SlotTimes&) = delete;

  // By the pipeline's thread. A session begins; and a run, whose iterations go from the first
  // access to the last one.
  void begin_session() { is_first_ = true; }
  void begin_run(int first, int last) { first_access_ = first, last_access_ = last; }

  // Before and after what is queued on a stream for an access of a slot.
  void begin(int access, size_t index, CUstream stream) {
    if (index >= slots_.size()) slots_.resize(index + 1);
    Slot& slot = slots_[index];
    if (access == first_access_) {
      slot.number = ++num_begun_;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (slot.timed != nullptr) free_.push_back(slot.timed);  // it was cut short
      slot.timed = is_due(slot.number) ? take(index, slot) : nullptr;
    }
    const bool is_first = access == kCompute && std::exchange(is_first_, false);
    if (slot.timed == nullptr) return;
    slot.timed->is_first |= is_first;
    mark(slot.timed->begin[static_cast<size_t>(access)], stream);
  }
  void end(int access, size_t index, CUstream stream) {
    Slot& slot = slots_[index];
    if (slot.timed != nullptr) {
      mark(slot.timed->end[static_cast<size_t>(access)], stream);
      slot.timed->has[static_cast<size_t>(access)] = true;
    }
    if (access != last_access_) return;
    if (access == kStore) slot.stored_by = slot.number;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_iterations_;
    num_transfers_ += last_access_ - first_access_;
    if (slot.timed == nullptr) return;
    queue_.push_back(std::exchange(slot.timed, nullptr));
    if (static_cast<i64>(queue_.size()) <= capacity_) return;
    free_.push_back(queue_.front());
    queue_.pop_front();
    ++num_dropped_;
  }

  // By any thread: reads up to `max_rows` iterations that are over, and returns how many. Writes a
  // row for each whose times are all known, as `write` says. `summary` gets the number of rows; the
  // iterations that were queued, with and without times, and their transfers; those that were
  // dropped; the last fill.
  i64 harvest(double* rows, i64 max_rows, double* summary) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<RelaxedCapture> relaxed;  // another thread may be capturing
    if (on_gpu_) relaxed.emplace();
    i64 count = 0;
    double* row = rows;
    for (; count < max_rows && !queue_.empty(); ++count) {
      Iteration* const iteration = queue_.front();
      const size_t last = iteration->has[kStore] ? kStore : kCompute;
      if (on_gpu_ && !is_done(iteration->end[last].event)) break;
      if (on_gpu_) read(*iteration);
      if (write(*iteration, row)) row += kNumColumns;
      queue_.pop_front();
      if (base_ != nullptr) free_.push_back(base_);
      base_ = iteration;
    }
    const i64 counts[] = {(row - rows) / kNumColumns, num_iterations_, num_transfers_,
                          num_dropped_};
    summary = std::copy(std::begin(counts), std::end(counts), summary);
    *summary = last_fill_ms_;
    return count;
  }

 private:
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  static constexpr i64 kNumColumns = 14;
  static constexpr u64 kBurst = 8;  // and one for each slot, whose last store a compute waits for
  static constexpr u64 kAllAtFirst = 32;  // so that short runs are seen

  // A place in the work of a stream; on the CPU a time.
  struct Moment {
    CUevent event = nullptr;  // made when it is first recorded
    double ms = 0;            // of an event: once it has been read
  };
  struct Iteration {
    u64 number = 0;  // from 1 on
    u64 stored_by = 0;
    size_t slot = 0;
    bool is_first = false;  // of a session: what its compute waits for is the fill
    std::array<bool, kNumAccesses> has{};
    std::array<Moment, kNumAccesses> begin, end;
  };
  struct Slot {
    u64 number = 0;     // of its last iteration
    u64 stored_by = 0;  // the last iteration that stored it
    Iteration* timed = nullptr;
  };
  struct Store {  // whose times were read
    u64 number = 0;
    double end_ms = 0;
  };

  static double now_ms() {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // A period is one longer than its bursts, so that they move through work that repeats itself.
  bool is_due(u64 number) const {
    if (every_ == 1 || number <= kAllAtFirst) return true;
    const u64 burst = kBurst + slots_.size();
    return (number - kAllAtFirst) % (every_ * burst + 1) < burst;
  }

  Iteration* take(size_t index, const Slot& slot) {
    if (free_.empty()) free_.push_back(&all_.emplace_back());
    Iteration* const iteration = free_.back();
    free_.pop_back();
    iteration->number = slot.number;
    iteration->stored_by = slot.stored_by;
    iteration->slot = index;
    iteration->is_first = false;
    iteration->has = {};
    return iteration;
  }

  void mark(Moment& moment, CUstream stream) {
    if (!on_gpu_) {
      moment.ms = now_ms() - origin_ms_;
      return;
    }
    if (moment.event == nullptr) {
      const RelaxedCapture relaxed;
      const Driver& driver = Driver::get();
      driver.check(driver.cuEventCreate(&moment.event, 0), "cuEventCreate");
    }
    record(moment.event, stream);
  }

  bool follows(const Iteration& iteration) const {
    return base_ != nullptr && !iteration.is_first && iteration.number == base_->number + 1;
  }

  // Times go on from the iteration before: a float of milliseconds is exact to 1 us up to 8 s.
  void read(Iteration& iteration) {
    const auto after = [](const Moment& from, CUevent event) {
      const Driver& driver = Driver::get();
      float ms = 0;
      driver.check(driver.cuEventElapsedTime(&ms, from.event, event), "cuEventElapsedTime");
      return from.ms + ms;
    };
    Moment& first = iteration.begin[iteration.has[kLoad] ? kLoad : kCompute];
    first.ms = base_ == nullptr ? 0 : after(base_->end[kCompute], first.event);
    for (size_t access = 0; access < kNumAccesses; ++access) {
      if (!iteration.has[access]) continue;
      for (Moment* moment : {&iteration.begin[access], &iteration.end[access]}) {
        if (moment != &first) moment->ms = after(first, moment->event);
      }
    }
  }

  // Columns, in milliseconds: begin and end of load, compute and store, NaN where there is none;
  // the compute; the direction that took longer; what the compute waited for a transfer; the wait
  // before the first compute of a session, -1 in others; by how much longer load, compute and store
  // kept link or GPU busy. And the number of transfers. Returns whether all of it is known.
  bool write(const Iteration& iteration, double* row) {
    const auto& begin = iteration.begin;
    const auto& end = iteration.end;
    const auto& has = iteration.has;
    for (size_t access = 0; access < kNumAccesses; ++access) {
      *row++ = has[access] ? begin[access].ms : kNone;
      *row++ = has[access] ? end[access].ms : kNone;
    }
    const auto link_ms = [&](size_t access, double& last_end_ms) {
      if (!has[access]) return 0.0;
      const double busy_ms = end[access].ms - std::max(begin[access].ms, last_end_ms);
      last_end_ms = std::max(last_end_ms, end[access].ms);
      return std::max(busy_ms, 0.0);
    };
    const double load_ms = link_ms(kLoad, load_end_ms_);
    const double store_ms = link_ms(kStore, store_end_ms_);

    // A compute waits for the one before it, and for the last transfer of its slot.
    if (iteration.slot >= stored_.size()) stored_.resize(iteration.slot + 1);
    Store& stored = stored_[iteration.slot];
    const double waited_ms = has[kLoad] ? end[kLoad].ms : stored.end_ms;
    const bool is_known =
        (iteration.is_first || follows(iteration)) &&
        (has[kLoad] || iteration.stored_by == 0 || iteration.stored_by == stored.number);
    if (has[kStore]) stored = {iteration.number, end[kStore].ms};
    double could_begin_ms = begin[kCompute].ms;
    double stall_ms = 0;
    if (follows(iteration)) {
      const double before_ms = base_->end[kCompute].ms;
      could_begin_ms = std::max(before_ms, std::min(waited_ms, could_begin_ms));
      stall_ms = could_begin_ms - before_ms;
    }
    const double fill_ms = has[kLoad] ? begin[kCompute].ms - begin[kLoad].ms : 0.0;
    if (iteration.is_first) last_fill_ms_ = fill_ms;
    const double rest[] = {end[kCompute].ms - begin[kCompute].ms,
                           std::max(load_ms, store_ms),
                           stall_ms,
                           iteration.is_first ? fill_ms : -1.0,
                           load_ms,
                           end[kCompute].ms - could_begin_ms,
                           store_ms,
                           (has[kLoad] ? 1.0 : 0.0) + (has[kStore] ? 1.0 : 0.0)};
    std::copy(std::begin(rest), std::end(rest), row);
    return is_known;
  }

  const bool on_gpu_;
  const i64 capacity_;
  const u64 every_;
  const double origin_ms_ = now_ms();  // on the CPU
  // Of the pipeline's thread.
  std::vector<Slot> slots_;
  u64 num_begun_ = 0;
  bool is_first_ = false;
  int first_access_ = kLoad, last_access_ = kCompute;

  std::mutex mutex_;  // of the rest
  std::deque<Iteration> all_;
  std::vector<Iteration*> free_;
  std::deque<Iteration*> queue_;
  Iteration* base_ = nullptr;  // the last that was read
  i64 num_iterations_ = 0, num_transfers_ = 0, num_dropped_ = 0;
  double load_end_ms_ = 0, store_end_ms_ = 0, last_fill_ms_ = kNone;
  std::vector<Store> stored_;  // the last of each slot
};

}  // namespace jitkern
