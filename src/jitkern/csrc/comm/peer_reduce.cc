// PeerReducer on the host: checks of its calls, their order among streams, and launches.
#include "comm/peer_reduce.h"

#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include "comm/operand.h"
#include "host/objects.h"
#include "ops/common.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;

// -- calls ---------------------------------------------------------------------------------------

// The grid for a part of up to `most_bytes`, the same on all ranks. In one shot the whole message
// is one part. On two H200s 8 KiB take 2.31 us with 4 blocks of 128 threads.
struct PeerShape {
  i64 most_bytes;
  u32 blocks;
  u32 threads;
};
constexpr PeerShape kShapes[] = {
    {2 << 10, 1, 128},    {4 << 10, 2, 128},    {8 << 10, 4, 128},
    {16 << 10, 8, 128},   {32 << 10, 16, 128},  {64 << 10, 32, 128},
    {128 << 10, 64, 128}, {256 << 10, 64, 256}, {i64(1) << 62, 64, 512},
};

// The constants of a reducer.
struct PeerPlan {
  int ordinal;  // the GPU's; -1 means the CPU
  int rank;
  PeerSlots slots;
  i64 one_shot_bytes;  // "auto" is one shot up to this size
};

// A call with checked arguments, and its grid.
struct PeerCall {
  PeerWay way;
  int type;
  i64 access_bytes;  // the widest for which both tensors are aligned
  u32 num_blocks;
  u32 num_threads;
  PeerReduceParams params{};

  bool is_empty() const { return params.num_vecs == 0; }
  // Whether a thread has more than one vector.
  bool has_several() const {
    return std::min(params.blocks.share(0).count, params.slots.vecs) > num_threads;
  }
};

Operand operand(const PeerPlan& plan, const char* op, const char* arg, AnyView value) {
  constexpr i64 kMostBytes = i64(1) << 34;  // 32-bit numbers of vectors
  const Operand x(op, arg, value, plan.ordinal, "the workspace");
  if (x.bytes > kMostBytes) {
    x.value_error(str(x.bytes, " bytes"), str("at most ", kMostBytes));
  }
  return x;
}

u32 num_vecs_of(i64 bytes) { return static_cast<u32>((bytes + kPeerVecBytes - 1) / kPeerVecBytes); }

// Completes a call that is split into parts.
PeerCall cut(const PeerPlan& plan, const Operand& x, const Operand& out, PeerCall call) {
  PeerReduceParams& p = call.params;
  call.type = float_type(x);
  p.x = x.data;
  p.out = out.data;
  p.slots = plan.slots;
  if (call.is_empty()) return call;
  u64 bits = address(x.data) | address(out.data);
  if (call.way == kScatter) bits |= static_cast<u64>(p.part_bytes);
  call.access_bytes = widest_vec(bits);
  if (call.access_bytes < x.item_bytes()) {
    const bool is_x = address(x.data) % static_cast<u64>(x.item_bytes()) != 0;
    (is_x ? x : out).value_error("memory that is not aligned to its elements", "aligned memory");
  }
  const i64 bytes = p.num_vecs * kPeerVecBytes;
  const auto fits = [&](const PeerShape& shape) { return bytes <= shape.most_bytes; };
  const PeerShape& shape = *std::find_if(std::begin(kShapes), std::end(kShapes), fits);
  call.num_blocks = std::min(shape.blocks, p.num_vecs);
  call.num_threads = shape.threads;
  p.blocks = PeerShares::of(p.num_vecs, call.num_blocks);
  return call;
}

PeerCall all_reduce_call(const PeerPlan& plan, AnyView x_arg, AnyView out_arg, i64 way) {
  const char* const op = "all_reduce";
  const Operand x = operand(plan, op, "x", x_arg);
  const Operand out = is_none(out_arg) ? x : operand(plan, op, "output", out_arg);
  out.same_dtype(x);
  out.has(x.count, "as in x");
  out.apart_from(x, x.data, "x itself, or memory of its own");
  PeerCall call{};
  PeerReduceParams& p = call.params;
  const u32 num_vecs = num_vecs_of(x.bytes);
  p.tail_bytes = static_cast<u32>(x.bytes % kPeerVecBytes);
  call.way = way >= 0                         ? static_cast<PeerWay>(way)
             : x.bytes <= plan.one_shot_bytes ? kOneShot
                                              : kTwoShot;
  // In two shots each rank needs a part, so that all notice a late rank in the first stage.
  if (num_vecs < plan.slots.num_ranks || plan.ordinal < 0) call.way = kOneShot;
  if (call.way == kOneShot) {
    p.part_bytes = x.bytes;
    p.num_vecs = num_vecs;
  } else {
    const PeerShares parts = PeerShares::of(num_vecs, plan.slots.num_ranks);
    p.part_bytes = parts.each * kPeerVecBytes;
    p.longer_parts = parts.longer;
    p.num_vecs = parts.share(0).count;
  }
  return cut(plan, x, out, call);
}

PeerCall reduce_scatter_call(const PeerPlan& plan, AnyView output_arg, AnyView x_arg) {
  const char* const op = "reduce_scatter";
  const Operand output = operand(plan, op, "output", output_arg);
  const Operand x = operand(plan, op, "x", x_arg);
  x.same_dtype(output);
  x.has_each_of(output, plan.slots.num_ranks);
  const i64 own = plan.rank * output.bytes;
  output.apart_from(x, x.data + own, "memory of its own, or this rank's part of it");
  PeerCall call{};
  call.way = kScatter;
  call.params.part_bytes = output.bytes;
  call.params.num_vecs = num_vecs_of(output.bytes);
  call.params.tail_bytes = static_cast<u32>(output.bytes % kPeerVecBytes);
  return cut(plan, x, output, call);
}

PeerCall meet_call(const PeerPlan& plan) {
  PeerCall call{kMeet, kFloat32, 16, 1, 32};
  call.params.num_vecs = 1;
  call.params.blocks = PeerShares::of(1, 1);
  call.params.slots = plan.slots;
  return call;
}

// -- late ranks ----------------------------------------------------------------------------------

// "rank 2" or "ranks 0, 2"
std::string ranks_text(i64 missing) {
  std::string text;
  int count = 0;
  for (int rank = 0; rank < kMostPeers; ++rank) {
    if ((missing >> rank & 1) == 0) continue;
    text += str(count++ > 0 ? ", " : "", rank);
  }
  return (count == 1 ? "rank " : "ranks ") + text;
}

// The last late call that this thread has raised, for the CommTimeoutError that Python makes of it.
struct LateCall {
  const char* op;
  i64 number;
  i64 rank;
  i64 missing;  // ranks, as bits
};
thread_local LateCall last_late{};

[[noreturn]] void raise_late(const char* kind, const LateCall& call, const std::string& note) {
  last_late = call;
  raise_error(kind, str(call.op, ": call ", call.number, " of rank ", call.rank, ": ",
                        ranks_text(call.missing), " did not come in time", note));
}

// Raises the fault that a kernel has recorded for its device. Any call on the device may find it.
[[noreturn]] void raise_late_fault(const char* op, const char*, i64 missing, i64 number, i64 rank,
                                   const char* note) {
  raise_late("jitkern.EarlierPeersLate", {op, number, rank, missing}, note);
}

Array<Any> last_late_call() {
  return {String(last_late.op), last_late.number, last_late.rank, last_late.missing};
}

constexpr const char* kOutcome = "the workspace is broken until reset()";
const FaultSite kSites[] = {fault_site("all_reduce", "x", raise_late_fault, kOutcome),
                            fault_site("reduce_scatter", "x", raise_late_fault, kOutcome),
                            fault_site("device_barrier", "", raise_late_fault, kOutcome)};
const char* op_of(FaultSite site) {
  return site == kSites[0] ? "all_reduce" : site == kSites[1] ? "reduce_scatter" : "device_barrier";
}

KernelTable& kernels() {
  static KernelTable table(
      "peer_reduce", {"dtype", "ranks", "access_bytes", "way", "several"},
      [](const Spec&, int in_flight, int) { return GroupShape{32, in_flight, 1, 1}; });
  return table;
}

class PeerReducer {
 public:
  PeerReducer(PeerPlan plan, const Array<int64_t>& addresses, u64 deadline_ns)
      : plan_(std::move(plan)), deadline_ns_(deadline_ns) {
    for (size_t i = 0; i < addresses.size(); ++i) {
      workspaces_[i] = reinterpret_cast<char*>(addresses[i]);
    }
    if (plan_.ordinal < 0) {
      failure_ = failure_on_gpu_ = new FaultRecord{};
      return;
    }
    Device& device = Device::get(plan_.ordinal);
    const ContextScope scope(device);
    const RelaxedCapture relaxed;
    failure_ = make_fault_record(&failure_on_gpu_);
    event_ = make_event();
  }
  // The record of its failure stays: a kernel or a graph may still write to it.
  ~PeerReducer() { destroy_event(event_); }

  void all_reduce(AnyView x, AnyView out, int64_t way) {
    refuse_tracers("all_reduce");
    run(all_reduce_call(plan_, x, out, way), kSites[0]);
  }
  void reduce_scatter(AnyView output, AnyView x) {
    refuse_tracers("reduce_scatter");
    run(reduce_scatter_call(plan_, output, x), kSites[1]);
  }
  // The FFI takes PyTorch's stream from `word`, a tensor on the GPU. If it is None, the call is
  // part of another collective call, which raises earlier faults itself.
  void device_barrier(AnyView word) { run(meet_call(plan_), kSites[2], is_none(word)); }
  // The address of this rank's word `intact`, which is kUnwritten unless its workspace is broken.
  i64 intact() {
    const auto* const control = reinterpret_cast<const PeerControl*>(workspaces_[plan_.rank]);
    return static_cast<i64>(address(&control->intact));
  }

  // Resets this rank's workspace. Waits for the GPU.
  void reset() {
    const std::lock_guard<std::mutex> turn(turn_);
    const i64 bytes = plan_.slots.workspace_bytes();
    if (plan_.ordinal < 0) {
      std::memset(workspaces_[plan_.rank], 0xff, static_cast<size_t>(bytes));
    } else {
      Device& device = Device::get(plan_.ordinal);
      const ContextScope context(device);
      JITKERN_CU(cuCtxSynchronize);
      const LaunchScope scope(device, CUstream{nullptr});
      scope.fill_bytes(workspaces_[plan_.rank], 0xff, bytes);
      JITKERN_CU(cuCtxSynchronize);
      if (failure_->state == 2) forget_fault(device, *failure_);  // so that no later call raises it
    }
    *failure_ = FaultRecord{};
  }

 private:
  void run(PeerCall call, FaultSite site, bool is_inside = false) {
    const std::lock_guard<std::mutex> turn(turn_);
    PeerReduceParams& p = call.params;
    p.rank = static_cast<u32>(plan_.rank);
    std::copy(std::begin(workspaces_), std::end(workspaces_), p.workspaces);
    p.deadline_ns = deadline_ns_;
    p.number = ++num_calls_;
    p.site = site;
    check_failure();
    if (plan_.ordinal < 0) return run_by_cpu(call);
    const CollectiveScope scope(plan_.ordinal);
    run_by_gpu(scope, call);
    if (!is_inside) scope.raise_earlier();
  }

  // The device's fault is raised once, by any call on it; the reducer's own failure stays.
  void check_failure() const {
    if (const_cast<volatile u32&>(failure_->state) != 2) return;
    std::atomic_thread_fence(std::memory_order_acquire);
    const FaultRecord& f = *failure_;
    if (plan_.ordinal >= 0) forget_fault(Device::get(plan_.ordinal), f);
    raise_late("jitkern.PeersLate", {op_of(f.site), f.value, f.bound, f.position},
               str("; ", kOutcome));
  }

  void run_by_gpu(const LaunchScope& scope, PeerCall& call) {
    if (call.is_empty()) return;
    order(op_of(call.params.site), scope.stream());
    const bool several = call.has_several();
    const Kernel& kernel = kernels()
                               .find(scope.device, Spec(call.type, plan_.slots.num_ranks,
                                                        call.access_bytes, call.way, several))
                               .entries[0];
    call.params.failure = failure_on_gpu_;
    call.params.fault = scope.device.fault_device;
    scope.launch_bytes(kernel, call.num_blocks, &call.params, sizeof(PeerReduceParams),
                       call.num_threads);
  }

  // A call on another stream waits for the last one: concurrent calls would mix their values.
  void order(const char* op, CUstream stream) {
    if (last_ == stream && !last_is_captured_) return;
    const bool is_captured = is_capturing(stream);
    const bool has_other = last_ && last_ != stream;
    if (has_other && (is_captured || !last_is_captured_) && is_capturing(*last_)) {
      raise_error("RuntimeError",
                  str(op,
                      ": called on another stream than that of the call before, which is being "
                      "captured, expected one stream: two calls at the same time would take each "
                      "other's values"));
    }
    // A captured call runs with its graph, which the caller orders.
    if (!is_captured && eager_ && eager_ != stream) {
      record(event_, *eager_);
      wait_for(stream, event_);
    }
    last_ = stream;
    last_is_captured_ = is_captured;
    if (!is_captured) eager_ = stream;
  }

  void run_by_cpu(const PeerCall& call) {
    if (call.is_empty()) return;
    const PeerReduceParams& p = call.params;
    const PeerResult result =
        peer_reduce_by_cpu(p, call.way, call.type, [] { return TVMFFIEnvCheckSignals() != 0; });
    switch (result.kind) {
      case PeerResult::kDone:
        return;
      case PeerResult::kInterrupted:
        throw tvm::ffi::EnvErrorAlreadySet();
      case PeerResult::kBroken:
        raise_error("jitkern.PeersBroken",
                    str(op_of(p.site),
                        ": an earlier call on this workspace did not come to its end; expected "
                        "reset() on every rank"));
      case PeerResult::kLate:
        *failure_ = {2, p.site, result.missing, p.number, p.rank};
        check_failure();
    }
  }

  const PeerPlan plan_;
  const u64 deadline_ns_;
  char* workspaces_[kMostPeers] = {};
  FaultRecord* failure_ = nullptr;  // the first failure, until reset()
  FaultRecord* failure_on_gpu_ = nullptr;

  std::mutex turn_;
  u32 num_calls_ = 0;
  CUevent event_ = nullptr;
  std::optional<CUstream> last_;  // the stream of the last call that had items
  bool last_is_captured_ = false;
  std::optional<CUstream> eager_;  // the stream of the last call that was not captured
};

constexpr i64 kNumSlots = 2 * 2 * kMostPeerBlocks;  // per writer

PeerPlan plan_of(int ordinal, int rank, u32 size, i64 workspace_bytes, i64 one_shot_bytes) {
  const i64 vecs =
      std::max<i64>(0, workspace_bytes - kPeerControlBytes) / (kNumSlots * size * kPeerVecBytes);
  if (vecs == 0) {
    const PeerSlots least{size, 1};
    raise_value_error("PeerReducer", "workspace_bytes", str(workspace_bytes),
                      str("at least ", least.workspace_bytes(), " for ", size, " ranks"));
  }
  return {ordinal, rank, {size, static_cast<u32>(std::min<i64>(vecs, 1 << 20))}, one_shot_bytes};
}

Map<String, Function> make_peer_reducer(int ordinal, Array<int64_t> addresses, int rank,
                                        i64 workspace_bytes, u64 deadline_ns, i64 one_shot_bytes) {
  const auto size = static_cast<u32>(addresses.size());
  const auto reducer = std::make_shared<PeerReducer>(
      plan_of(ordinal, rank, size, workspace_bytes, one_shot_bytes), addresses, deadline_ns);
  return {{"all_reduce", method(reducer, &PeerReducer::all_reduce)},
          {"reduce_scatter", method(reducer, &PeerReducer::reduce_scatter)},
          {"device_barrier", method(reducer, &PeerReducer::device_barrier)},
          {"intact", method(reducer, &PeerReducer::intact)},
          {"reset", method(reducer, &PeerReducer::reset)}};
}

// The size of a workspace in which messages of up to `max_bytes` take one epoch.
i64 peer_workspace_bytes(u32 size, i64 max_bytes, i64 one_shot_bytes) {
  i64 slot_bytes = 1;
  for (const i64 part : {std::min(max_bytes, one_shot_bytes), ceil_div(max_bytes, size)}) {
    for (const PeerShape& shape : kShapes) {
      const i64 bytes = ceil_div(std::min(part, shape.most_bytes), i64{shape.blocks});
      slot_bytes = std::max(slot_bytes, bytes);
    }
  }
  const auto vecs = static_cast<u32>(ceil_div(slot_bytes + kPeerVecBytes - 1, kPeerVecBytes));
  return PeerSlots{size, vecs}.workspace_bytes();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_late_call, last_late_call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_peer_reducer, make_peer_reducer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_workspace_bytes, peer_workspace_bytes);

}  // namespace jitkern
