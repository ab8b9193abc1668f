#include <algorithm>
#include <limits>

#include "host/staging.h"
#include "offload/slots.h"

namespace jitkern {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double elapsed_ms(CUevent from, CUevent to) {
  const Driver& driver = Driver::get();
  float ms = 0;
  driver.check(driver.cuEventElapsedTime(&ms, from, to), "cuEventElapsedTime");
  return ms;
}

}  // namespace

SlotTimes::SlotTimes(bool on_gpu, i64 capacity)
    : on_gpu_(on_gpu), capacity_(capacity), last_fill_ms_(kNone) {}

SlotTimes::~SlotTimes() {
  for (const auto& marks : all_) {
    for (const auto* moments : {&marks->begin, &marks->end}) {
      for (const Moment& moment : *moments) destroy_event(moment.event);
    }
  }
}

void SlotTimes::forget_events() {
  for (const auto& marks : all_) marks->begin = marks->end = {};
}

Marks* SlotTimes::take(Marks* old) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (old != nullptr) release(old);
  if (free_.empty()) {
    all_.push_back(std::make_unique<Marks>());
    all_.back()->is_timed = true;
    free_.push_back(all_.back().get());
  }
  Marks* const marks = free_.back();
  free_.pop_back();
  marks->refs = 1;
  return marks;
}

void SlotTimes::give_back(Marks* marks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  release(marks);
}

void SlotTimes::push(Marks* marks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_pushed_;
  num_transfers_ += marks->num_transfers();
  if (!marks->is_timed) return;
  ++marks->refs;
  queue_.push_back(marks);
  if (static_cast<i64>(queue_.size()) <= capacity_) return;
  release(queue_.front());  // which a slot may still have
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
    Marks* const marks = queue_.front();
    if (on_gpu_ && !is_done(marks->end[marks->last].event)) break;
    if (on_gpu_) read(*marks);
    num_rows += write(*marks, rows + num_rows * kNumColumns) ? 1 : 0;
    queue_.pop_front();  // with its reference, which is the base's from now on
    if (base_ != nullptr) release(base_);
    base_ = marks;
  }
  summary[kRows] = static_cast<double>(num_rows);
  summary[kIterations] = static_cast<double>(num_pushed_);
  summary[kAllTransfers] = static_cast<double>(num_transfers_);
  summary[kDropped] = static_cast<double>(num_dropped_);
  summary[kLastFillMs] = last_fill_ms_;
  return count;
}

// From the iteration before it: a float of milliseconds is exact to a microsecond up to 8 seconds.
// After a pause or a gap, from its own begin.
void SlotTimes::read(Marks& marks) {
  const bool is_apart = !follows(marks);
  Moment& first = marks.begin[marks.has(kLoad) ? kLoad : kCompute];
  if (base_ != nullptr && is_apart) {
    const Moment& last = base_->end[kCompute];
    first.ms = last.ms + elapsed_ms(last.event, first.event);
  } else if (is_apart) {
    first.ms = 0;
  }
  const Moment from = is_apart ? first : base_->end[kCompute];
  for (int access = 0; access < kNumAccesses; ++access) {
    if (!marks.has(access)) continue;
    for (Moment* moment : {&marks.begin[access], &marks.end[access]}) {
      moment->ms = from.ms + elapsed_ms(from.event, moment->event);
    }
  }
}

// Returns whether that is a row: whether it is known what the compute waited for.
bool SlotTimes::write(const Marks& marks, double* row) {
  const auto put = [&](Column column, double value) { row[column] = value; };
  for (int access = 0; access < kNumAccesses; ++access) {
    const bool has = marks.has(access);
    put(static_cast<Column>(2 * access), has ? marks.begin[access].ms : kNone);
    put(static_cast<Column>(2 * access + 1), has ? marks.end[access].ms : kNone);
  }
  // The streams of one direction share the link: what counts is how much longer it was busy. For
  // the first of a burst that is unknown, so it is no row.
  const auto link_ms = [&](int access, double& last_end_ms) {
    if (!marks.has(access)) return 0.0;
    const double end_ms = marks.end[access].ms;
    const double busy_ms = end_ms - std::max(marks.begin[access].ms, last_end_ms);
    last_end_ms = std::max(last_end_ms, end_ms);
    return std::max(busy_ms, 0.0);
  };
  const double load_ms = link_ms(kLoad, load_end_ms_);
  const double store_ms = link_ms(kStore, store_end_ms_);

  const size_t slot = static_cast<size_t>(marks.slot);
  if (slot >= stored_.size()) stored_.resize(slot + 1);
  Stored& stored = stored_[slot];
  const double begin_ms = marks.begin[kCompute].ms;
  const double end_ms = marks.end[kCompute].ms;
  const double waited_ms = !on_gpu_           ? marks.waited_ms
                           : marks.has(kLoad) ? marks.end[kLoad].ms
                                              : stored.end_ms;
  const bool is_known =
      (marks.is_first || follows(marks)) &&
      (marks.has(kLoad) || marks.stored_by == 0 || marks.stored_by == stored.number);
  if (marks.has(kStore)) stored = {marks.number, marks.end[kStore].ms};
  double stall_ms = 0;
  double could_begin_ms = begin_ms;
  if (follows(marks)) {
    const double before_ms = base_->end[kCompute].ms;
    could_begin_ms = std::max(before_ms, std::min(waited_ms, begin_ms));
    stall_ms = could_begin_ms - before_ms;
  }
  put(kComputeMs, end_ms - begin_ms);
  put(kTransferMs, std::max(load_ms, store_ms));
  put(kStallMs, stall_ms);
  const double fill_ms = marks.has(kLoad) ? begin_ms - marks.begin[kLoad].ms : 0.0;
  if (marks.is_first) last_fill_ms_ = fill_ms;
  put(kFillMs, marks.is_first ? fill_ms : -1.0);
  put(kLoadLinkMs, load_ms);
  put(kComputeLinkMs, end_ms - could_begin_ms);
  put(kStoreLinkMs, store_ms);
  put(kTransfers, marks.num_transfers());
  return is_known;
}

}  // namespace jitkern
