#include "offload/slot_times.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "host/staging.h"

namespace jitkern {

namespace {

// On an H200 a timed event costs the host 1.03 us and the GPU 1.6, others 0.22 each.
constexpr u64 kBurst = 8;  // and one for each slot: a compute may wait for the slot's last store
constexpr u64 kAllAtFirst = 32;  // so that short runs are seen
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double now_ms() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CUevent make_timed_event() {
  const RelaxedCapture relaxed;
  const Driver& driver = Driver::get();
  CUevent event = nullptr;
  driver.check(driver.cuEventCreate(&event, 0), "cuEventCreate");
  return event;
}

double elapsed_ms(CUevent from, CUevent to) {
  const Driver& driver = Driver::get();
  float ms = 0;
  driver.check(driver.cuEventElapsedTime(&ms, from, to), "cuEventElapsedTime");
  return ms;
}

}  // namespace

SlotTimes::SlotTimes(bool on_gpu, i64 capacity, i64 every)
    : on_gpu_(on_gpu),
      capacity_(capacity),
      every_(static_cast<u64>(every)),
      origin_ms_(now_ms()),
      last_fill_ms_(kNone) {}

SlotTimes::~SlotTimes() {
  for (const Iteration& iteration : all_) {
    for (const auto* moments : {&iteration.begin, &iteration.end}) {
      for (const Moment& moment : *moments) {
        if (moment.event != nullptr) Driver::get().cuEventDestroy_v2(moment.event);
      }
    }
  }
}

// A period is one longer than bursts fit into, so that they move through work that repeats itself.
bool SlotTimes::is_due(u64 number) const {
  if (every_ == 1 || number <= kAllAtFirst) return true;
  const u64 burst = kBurst + slots_.size();
  return (number - kAllAtFirst) % (every_ * burst + 1) < burst;
}

void SlotTimes::mark(Moment& moment, CUstream stream) {
  if (!on_gpu_) {
    moment.ms = now_ms() - origin_ms_;
    return;
  }
  if (moment.event == nullptr) moment.event = make_timed_event();
  record(moment.event, stream);
}

void SlotTimes::begin(int access, size_t index, CUstream stream) {
  if (index >= slots_.size()) slots_.resize(index + 1);
  Slot& slot = slots_[index];
  if (access == first_access_) {
    slot.number = ++num_begun_;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (slot.timed != nullptr) free_.push_back(std::exchange(slot.timed, nullptr));  // cut short
    if (is_due(slot.number)) {
      if (free_.empty()) free_.push_back(&all_.emplace_back());
      slot.timed = free_.back();
      free_.pop_back();
      slot.timed->number = slot.number;
      slot.timed->stored_by = slot.stored_by;
      slot.timed->slot = index;
      slot.timed->is_first = false;
      slot.timed->has = {};
    }
  }
  const bool is_first = access == kCompute && std::exchange(is_first_, false);
  if (slot.timed == nullptr) return;
  slot.timed->is_first |= is_first;
  mark(slot.timed->begin[static_cast<size_t>(access)], stream);
}

void SlotTimes::end(int access, size_t index, CUstream stream) {
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

i64 SlotTimes::harvest(double* rows, i64 max_rows, double* summary) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<RelaxedCapture> relaxed;  // another thread may be capturing
  if (on_gpu_) relaxed.emplace();
  i64 count = 0;
  i64 num_rows = 0;
  for (; count < max_rows && !queue_.empty(); ++count) {
    Iteration* const iteration = queue_.front();
    const int last = iteration->has[kStore] ? kStore : kCompute;
    if (on_gpu_ && !is_done(iteration->end[static_cast<size_t>(last)].event)) break;
    if (on_gpu_) read(*iteration);
    num_rows += write(*iteration, rows + num_rows * kNumColumns) ? 1 : 0;
    queue_.pop_front();
    if (base_ != nullptr) free_.push_back(base_);
    base_ = iteration;
  }
  summary[kRows] = static_cast<double>(num_rows);
  summary[kIterations] = static_cast<double>(num_iterations_);
  summary[kAllTransfers] = static_cast<double>(num_transfers_);
  summary[kDropped] = static_cast<double>(num_dropped_);
  summary[kLastFillMs] = last_fill_ms_;
  return count;
}

// From the iteration before it: a float of milliseconds is exact to a microsecond up to 8 seconds.
void SlotTimes::read(Iteration& iteration) {
  Moment& first = iteration.begin[iteration.has[kLoad] ? kLoad : kCompute];
  first.ms = 0;
  if (base_ != nullptr) {
    const Moment& last = base_->end[kCompute];
    first.ms = last.ms + elapsed_ms(last.event, first.event);
  }
  for (size_t access = 0; access < kNumAccesses; ++access) {
    if (!iteration.has[access]) continue;
    for (Moment* moment : {&iteration.begin[access], &iteration.end[access]}) {
      if (moment != &first) moment->ms = first.ms + elapsed_ms(first.event, moment->event);
    }
  }
}

// Returns whether that is a row: whether it is known what the compute waited for.
bool SlotTimes::write(const Iteration& iteration, double* row) {
  const auto& begin = iteration.begin;
  const auto& end = iteration.end;
  const auto& has = iteration.has;
  for (size_t access = 0; access < kNumAccesses; ++access) {
    row[2 * access] = has[access] ? begin[access].ms : kNone;
    row[2 * access + 1] = has[access] ? end[access].ms : kNone;
  }
  // The streams of one direction share the link: what counts is how much longer it was busy.
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
  row[kComputeMs] = end[kCompute].ms - begin[kCompute].ms;
  row[kTransferMs] = std::max(load_ms, store_ms);
  row[kStallMs] = stall_ms;
  row[kFillMs] = iteration.is_first ? fill_ms : -1.0;
  row[kLoadLinkMs] = load_ms;
  row[kComputeLinkMs] = end[kCompute].ms - could_begin_ms;
  row[kStoreLinkMs] = store_ms;
  row[kTransfers] = (has[kLoad] ? 1 : 0) + (has[kStore] ? 1 : 0);
  return is_known;
}

}  // namespace jitkern
