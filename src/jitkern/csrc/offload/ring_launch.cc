// A DescriptorRing consumed by kernels: of one call, or of a server that runs until it is stopped.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <memory>

#include "ops/unpack_host.h"
#include "ops/unpack_ring.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr const char* kOp = "unpack";
constexpr u32 kMostSms = 16;  // of a server: the largest cluster

[[noreturn]] void raise_runtime_error(const char* op, const char* arg, const std::string& text,
                                      const char* note) {
  throw tvm::ffi::Error("RuntimeError", std::string(op) + ": " + arg + ": " + text + note, "");
}
[[noreturn]] void raise_busy(const char* op, const char* arg, i64, i64, i64, const char* note) {
  raise_runtime_error(op, arg,
                      "another call, or a server, was consuming the ring; have one follow the "
                      "other on a stream, or by an event",
                      note);
}
[[noreturn]] void raise_broken(const char* op, const char* arg, i64 slot, i64, i64,
                               const char* note) {
  raise_runtime_error(op, arg,
                      "a push in slot " + std::to_string(slot) +
                          " has seals that are not its word, as no producer of both/ring.h leaves "
                          "them",
                      note);
}

const DescriptorSites kSites(true);
const FaultSite kBusy = fault_site(kOp, "descriptors", raise_busy, "nothing was copied");
const FaultSite kBroken = fault_site(kOp, "descriptors", raise_broken, "its server has ended");

// The entry points of unpack_ring.cu.
enum Entry { kStage, kComplete, kServe };

KernelTable& kernels() {
  static KernelTable table("unpack_ring", {}, [](const Spec&, int in_flight, int) {
    return GroupShape{32, in_flight, 1, 1};
  });
  return table;
}

// No call has 0.
u64 new_call() {
  static std::atomic<u64> calls{0};
  return ++calls;
}

// What the state has behind it, one after the other.
i64 state_bytes(const RingHeader& ring) {
  return static_cast<i64>(sizeof(RingState)) + i64(ring.num_slots) * i64(sizeof(u64));
}
i64 taken_at(const RingHeader& ring) { return ceil_div(state_bytes(ring), 64) * 64; }
i64 staged_at(const RingHeader& ring) {
  return ceil_div(taken_at(ring) + i64(ring.num_slots) * i64(sizeof(RingPush)), 64) * 64;
}

class RingOnGpu {
 public:
  // `host`: the ring's memory, `base`: where kernels read it, `state`: device memory.
  RingOnGpu(tvm::ffi::Tensor host, int64_t base, tvm::ffi::Tensor state)
      : host_(std::move(host)), state_(std::move(state)) {
    params_.ring = *static_cast<const RingHeader*>(host_.data_ptr());
    params_.base = reinterpret_cast<const char*>(base);
    params_.host = const_cast<char*>(memory_range(host_.data_ptr()).device_address);
    char* const at = static_cast<char*>(state_.data_ptr());
    params_.state = reinterpret_cast<RingState*>(at);
    params_.consumed = reinterpret_cast<u64*>(at + sizeof(RingState));
    params_.taken = reinterpret_cast<RingPush*>(at + taken_at(params_.ring));
    params_.staged = reinterpret_cast<Descriptor*>(at + staged_at(params_.ring));
    params_.busy = kBusy;
    params_.broken = kBroken;
    if (params_.base == nullptr) params_.base = params_.host;
  }

  void consume(AnyView dst, AnyView src, i64 slot, i64 num_slots) const {
    const UnpackSides sides = checked_sides(dst, src);
    const LaunchScope scope(sides.on_gpu());
    const std::vector<Kernel>& entries = kernels().find(scope.device, Spec()).entries;
    RingParams ring = params_;
    ring.call = new_call();
    ring.slot = slot;
    ring.most = static_cast<u32>(num_slots);
    ring.fault = scope.device.fault_device;
    scope.launch(entries[kStage], 1, ring);
    launch_unpack(scope, kStructs, unpack_params(sides, ring));
    scope.launch(entries[kComplete], 1, ring);
  }

  // Queues the server on a stream; it looks at `stop`, an u32 in pinned memory, at each turn.
  void serve(AnyView dst, AnyView src, i64 num_sms, i64 idle_ns, i64 stop, i64 stream) const {
    const UnpackSides sides = checked_sides(dst, src);
    Device& device = Device::get(state_.device().device_id);
    check_pending_fault(device);
    const LaunchScope scope(device, reinterpret_cast<CUstream>(stream));
    ServeParams params{params_, {}, nullptr, static_cast<u64>(idle_ns)};
    params.ring.call = new_call();
    params.ring.slot = -1;
    params.ring.fault = device.fault_device;
    params.unpack = unpack_params(sides, params.ring);
    params.unpack.fault = device.fault_device;
    params.stop = reinterpret_cast<const u32*>(
        memory_range(reinterpret_cast<const void*>(stop)).device_address);
    const Kernel& kernel = kernels().find(device, Spec()).entries[kServe];
    scope.launch(kernel, num_sms, params, 1, static_cast<unsigned>(num_sms));
  }

 private:
  UnpackSides checked_sides(AnyView dst, AnyView src) const {
    const UnpackSides sides(dst, src);
    const int ordinal = state_.device().device_id;
    const Rows& on_gpu = sides.on_gpu();
    if (!on_gpu.on_cuda() || on_gpu.ordinal() != ordinal) {
      on_gpu.value_error("device " + on_gpu.device_name(),
                         "device cuda:" + std::to_string(ordinal) + ", the ring's");
    }
    sides.check_sizes();
    return sides;
  }

  static UnpackParams unpack_params(const UnpackSides& sides, const RingParams& ring) {
    UnpackParams params = sides.params();
    params.descriptors = ring.staged;
    params.num_descriptors = ring.most * ring.ring.max_descriptors;
    params.count = &ring.state->num_descriptors;
    params.count_bytes = 8;
    params.owner = &ring.state->owner;
    params.call = ring.call;
    kSites.give_to(params);
    return params;
  }

  tvm::ffi::Tensor host_;
  tvm::ffi::Tensor state_;
  RingParams params_{};
};

// The bytes of device memory, all zero, that kernels need to consume a ring.
int64_t ring_state_bytes(int64_t num_slots, int64_t max_descriptors) {
  const RingHeader ring =
      ring_layout(static_cast<u32>(num_slots), static_cast<u32>(max_descriptors));
  return staged_at(ring) + num_slots * max_descriptors * i64(sizeof(Descriptor));
}

// consume and serve of a ring.
Array<Function> ring_on_gpu(tvm::ffi::Tensor host, int64_t base, tvm::ffi::Tensor state) {
  const auto made = std::make_shared<RingOnGpu>(std::move(host), base, std::move(state));
  return {
      Function::FromTyped([made](AnyView dst, AnyView src, int64_t slot, int64_t num_slots) {
        made->consume(dst, src, slot, num_slots);
      }),
      Function::FromTyped(
          [made](AnyView dst, AnyView src, int64_t num_sms, int64_t idle_ns, int64_t stop,
                 int64_t stream) { made->serve(dst, src, num_sms, idle_ns, stop, stream); }),
  };
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_state_bytes, ring_state_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_on_gpu, ring_on_gpu);

}  // namespace jitkern
