// The streams and events of a SlotPipeline. Each use of a slot waits for the use before it, on
// whatever stream that was: so a load waits for the compute that reads the slot, a compute for what
// has been loaded, a store for what has been computed, and what comes next for the store. That is
// one wait and one record for each use, and the whole of an iteration in two or three calls.
#include "offload/slots.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "host/staging.h"

namespace jitkern {

namespace {

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
                         const std::vector<CUstream>& stores, i64 capacity)
    : device_(ordinal < 0 ? nullptr : &Device::get(ordinal)),
      owner_(getpid()),
      num_loads_(loads.size()),
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
  if (times && chain.marks != &chain.own) times->give_back(chain.marks);
  chain.marks = &chain.own;
  chain.own.run = 0;
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

Marks& SlotStreams::marks_of(Chain& chain, int access, i64 index) {
  const Marks& had = *chain.marks;
  const bool goes_on = had.run == run_ && access != kLoad && !had.has(access);
  if (goes_on) return *chain.marks;
  if (times && !is_capturing_) {
    chain.marks = times->take(chain.marks == &chain.own ? nullptr : chain.marks);
  }
  Marks& marks = *chain.marks;
  marks.run = run_;
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
  if (marks.is_timed && access == final_access_) times->push(&marks);
}

i64 SlotStreams::harvest(double* columns, i64 max_rows) {
  std::optional<ContextScope> scope;
  if (device_ != nullptr) scope.emplace(*device_);
  return times->harvest(columns, max_rows);
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

// next, enter, start, fork, leave, add_slot, harvest and num_dropped of streams of their own.
Array<Function> make_slot_streams(int64_t ordinal, int64_t compute, Array<int64_t> loads,
                                  Array<int64_t> stores, int64_t capacity) {
  const auto made =
      std::make_shared<SlotStreams>(static_cast<int>(ordinal), reinterpret_cast<CUstream>(compute),
                                    streams_of(loads), streams_of(stores), capacity);
  return {
      Function::FromTyped(
          [made](int64_t access, int64_t slot) { made->next(static_cast<int>(access), slot); }),
      Function::FromTyped(
          [made](int64_t caller) { return made->enter(reinterpret_cast<CUstream>(caller)); }),
      Function::FromTyped([made](int64_t access) { made->start(static_cast<int>(access)); }),
      Function::FromTyped([made] { made->fork(); }),
      Function::FromTyped([made] { made->leave(); }),
      Function::FromTyped([made](int64_t slot) { made->add_slot(slot); }),
      Function::FromTyped([made](int64_t columns, int64_t max_rows) {
        return made->harvest(reinterpret_cast<double*>(columns), max_rows);
      }),
      Function::FromTyped([made] { return made->times->num_dropped(); }),
  };
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_slot_streams, make_slot_streams);

}  // namespace jitkern
