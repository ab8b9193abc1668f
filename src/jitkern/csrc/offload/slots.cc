// The streams and events of a SlotPipeline. Each use of a slot waits for the use before it, on
// whatever stream that was: one wait and one record for each use.
#include "offload/slots.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "host/staging.h"

namespace jitkern {

namespace {

// Iterations with times come in bursts, as what one waited for is known by the ones before it. On
// an H200 a timed event costs the host 1.03 us and the GPU 1.6, others 0.22 each.
constexpr u64 kBurst = 8;  // and one for each slot: a compute may wait for the slot's last store
constexpr u64 kAllAtFirst = 32;  // so that short runs are seen

double now_ms() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CUevent make_timed_event() {
  const Driver& driver = Driver::get();
  CUevent event = nullptr;
  driver.check(driver.cuEventCreate(&event, 0), "cuEventCreate");
  return event;
}

}  // namespace

void destroy_event(CUevent event) {
  if (event != nullptr) Driver::get().cuEventDestroy_v2(event);
}

SlotStreams::SlotStreams(int ordinal, CUstream compute, const std::vector<CUstream>& loads,
                         const std::vector<CUstream>& stores, i64 capacity, i64 every)
    : device_(ordinal < 0 ? nullptr : &Device::get(ordinal)),
      owner_(getpid()),
      num_loads_(loads.size()),
      every_(static_cast<u64>(every)),
      origin_ms_(now_ms()) {
  lanes_.emplace_back().stream = compute;
  for (const CUstream stream : loads) lanes_.emplace_back().stream = stream;
  for (const CUstream stream : stores) lanes_.emplace_back().stream = stream;
  if (capacity > 0) times.emplace(device_ != nullptr, capacity);
  if (device_ == nullptr) return;
  const ContextScope scope(*device_);
  const RelaxedCapture relaxed;
  forked_ = make_event();
  for (Lane& lane : lanes_) lane.joined = make_event();
}

SlotStreams::~SlotStreams() {
  if (device_ == nullptr) return;
  if (getpid() != owner_) {  // a forked child, in which the driver is not to be asked
    if (times) times->forget_events();
    return;
  }
  destroy_event(forked_);
  for (const Lane& lane : lanes_) destroy_event(lane.joined);
  for (const Slot& slot : slots_) {
    for (const Chain* chain : {&slot.eager, &slot.captured}) {
      for (const Moment& moment : chain->own.end) destroy_event(moment.event);
    }
  }
}

SlotStreams::Lane& SlotStreams::lane_of(int access, i64 index) {
  if (access == kCompute) return lanes_[0];
  const size_t num_stores = lanes_.size() - 1 - num_loads_;
  const size_t number = static_cast<size_t>(index);
  return access == kLoad ? lanes_[1 + number % num_loads_]
                         : lanes_[1 + num_loads_ + number % num_stores];
}

void SlotStreams::mark(Moment& moment, const Lane& lane, bool is_timed) {
  if (device_ == nullptr) {
    moment.ms = now_ms() - origin_ms_;
    return;
  }
  if (moment.event == nullptr) {
    const RelaxedCapture relaxed;
    moment.event = is_timed ? make_timed_event() : make_event();
  }
  record(moment.event, lane.stream);
}

void SlotStreams::add_slot(i64 index) {
  std::optional<ContextScope> scope;
  if (device_ != nullptr) scope.emplace(*device_);
  if (static_cast<size_t>(index) == slots_.size()) slots_.emplace_back();
  Chain& chain = slots_.at(static_cast<size_t>(index)).eager;
  // Torch may hand out memory that kernels on its stream still use: as if they used the slot.
  if (chain.marks->is_timed) times->give_back(chain.marks);
  chain.marks = &chain.own;
  chain.own.run = 0;
  chain.own.seen = 0;
  mark(chain.own.end[kCompute], lanes_[0], false);
  chain.lane = &lanes_[0];
  chain.ended = chain.own.end[kCompute].event;
}

bool SlotStreams::enter(CUstream caller) {
  ++session_;
  is_first_ = true;
  caller_ = caller;
  is_capturing_ = false;
  if (device_ == nullptr) return false;
  const ContextScope scope(*device_);
  const Driver& driver = Driver::get();
  int status = 0;
  driver.check(driver.cuStreamIsCapturing(caller, &status), "cuStreamIsCapturing");
  is_capturing_ = status != 0;
  record(forked_, caller);
  for (Lane& lane : lanes_) lane.is_forked = lane.is_used = false;
  use(lanes_[0]);
  return is_capturing_;
}

void SlotStreams::start(int final_access) {
  ++run_;
  final_access_ = final_access;
}

// Behind the caller's stream, or where `fork` was called.
void SlotStreams::use(Lane& lane) {
  if (lane.is_forked || device_ == nullptr) return;
  wait_for(lane.stream, forked_);
  lane.is_forked = lane.is_used = true;
}

void SlotStreams::fork() {
  if (device_ == nullptr) return;
  const ContextScope scope(*device_);
  record(forked_, lanes_[0].stream);
  for (size_t i = 1; i < lanes_.size(); ++i) lanes_[i].is_forked = false;
}

void SlotStreams::next(int access, i64 index) {
  std::optional<ContextScope> scope;
  if (device_ != nullptr) scope.emplace(*device_);
  end_open();
  if (access != kNoAccess) begin(access, index);
}

// One burst in each period, at places that the golden ratio spreads, so that periods of the work,
// such as the blocks of a run, do not hide.
bool SlotStreams::is_due(u64 number) const {
  if (every_ == 1 || number <= kAllAtFirst) return true;
  const u64 burst = kBurst + slots_.size();
  const u64 period = every_ * burst;
  const u64 since = number - 1 - kAllAtFirst;
  const u32 spread = static_cast<u32>(since / period * 2654435769u);
  const u64 first = spread * (period - burst + 1) >> 32;
  const u64 place = since % period;
  return place >= first && place < first + burst;
}

Marks& SlotStreams::marks_of(Chain& chain, int access, i64 index) {
  Marks& had = *chain.marks;
  const bool goes_on = had.run == run_ && access != kLoad && !had.has(access);
  if (goes_on) return had;
  const u64 stored_by = had.has(kStore) ? had.number : 0;
  const u64 number = is_capturing_ ? 0 : ++num_begun_;
  if (times && !is_capturing_ && is_due(number)) {
    chain.marks = times->take(had.is_timed ? &had : nullptr);
  } else if (had.is_timed) {
    times->give_back(&had);
    chain.marks = &chain.own;
  }
  Marks& marks = *chain.marks;
  marks.run = run_;
  marks.number = number;
  marks.stored_by = stored_by;
  marks.seen = 0;
  marks.is_first = false;
  marks.slot = static_cast<int>(index);
  return marks;
}

void SlotStreams::begin(int access, i64 index) {
  Slot& slot = slots_.at(static_cast<size_t>(index));
  Chain& chain = is_capturing_ ? slot.captured : slot.eager;
  Lane& lane = lane_of(access, index);
  use(lane);
  const bool is_known = chain.lane != nullptr && (!is_capturing_ || chain.session == session_);
  if (is_known && chain.lane != &lane && device_ != nullptr) {
    wait_for(lane.stream, chain.ended);
  }
  Marks& marks = marks_of(chain, access, index);
  if (access == kCompute) {
    marks.is_first = std::exchange(is_first_, false);
    marks.waited_ms = transferred_ms_;
  }
  if (marks.is_timed) mark(marks.begin[access], lane, true);
  open_ = {&chain, &lane, access};
}

void SlotStreams::end_open() {
  const auto [chain, lane, access] = std::exchange(open_, Open());
  if (chain == nullptr) return;
  Marks& marks = *chain->marks;
  mark(marks.end[access], *lane, marks.is_timed);
  if (access != kCompute) transferred_ms_ = marks.end[access].ms;
  marks.seen |= 1U << access;
  marks.last = access;
  chain->lane = lane;
  chain->ended = marks.end[access].event;
  chain->session = session_;
  if (times && !is_capturing_ && access == final_access_) times->push(&marks);
}

i64 SlotStreams::harvest(double* rows, i64 max_rows, double* summary) {
  std::optional<ContextScope> scope;
  if (device_ != nullptr) scope.emplace(*device_);
  return times->harvest(rows, max_rows, summary);
}

void SlotStreams::leave() {
  std::optional<ContextScope> scope;
  if (device_ != nullptr) scope.emplace(*device_);
  const Driver* driver = device_ == nullptr ? nullptr : &Driver::get();
  CUresult failed = kCudaSuccess;
  const auto note = [&](CUresult result) { failed = failed == kCudaSuccess ? result : failed; };
  for (Lane& lane : lanes_) {
    if (!std::exchange(lane.is_used, false) || lane.stream == caller_) continue;
    note(driver->cuEventRecord(lane.joined, lane.stream));
    note(driver->cuStreamWaitEvent(caller_, lane.joined, 0));
  }
  if (driver != nullptr) driver->check(failed, "SlotPipeline: the caller's stream could not wait");
}

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

std::vector<CUstream> streams_of(const Array<int64_t>& handles) {
  std::vector<CUstream> streams;
  for (const int64_t handle : handles) streams.push_back(reinterpret_cast<CUstream>(handle));
  return streams;
}

// next, enter, start, fork, leave, add_slot and harvest of streams of their own.
Array<Function> make_slot_streams(int64_t ordinal, int64_t compute, Array<int64_t> loads,
                                  Array<int64_t> stores, int64_t capacity, int64_t every) {
  const auto made =
      std::make_shared<SlotStreams>(static_cast<int>(ordinal), reinterpret_cast<CUstream>(compute),
                                    streams_of(loads), streams_of(stores), capacity, every);
  return {
      Function::FromTyped(
          [made](int64_t access, int64_t slot) { made->next(static_cast<int>(access), slot); }),
      Function::FromTyped(
          [made](int64_t caller) { return made->enter(reinterpret_cast<CUstream>(caller)); }),
      Function::FromTyped([made](int64_t access) { made->start(static_cast<int>(access)); }),
      Function::FromTyped([made] { made->fork(); }),
      Function::FromTyped([made] { made->leave(); }),
      Function::FromTyped([made](int64_t slot) { made->add_slot(slot); }),
      Function::FromTyped([made](int64_t rows, int64_t max_rows, int64_t summary) {
        return made->harvest(reinterpret_cast<double*>(rows), max_rows,
                             reinterpret_cast<double*>(summary));
      }),
  };
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_slot_streams, make_slot_streams);

}  // namespace jitkern
