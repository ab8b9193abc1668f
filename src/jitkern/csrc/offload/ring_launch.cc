// Kernels that consume a DescriptorRing: one call, or a server that runs until it is stopped.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "host/objects.h"
#include "host/staging.h"
#include "ops/unpack_host.h"
#include "ops/unpack_ring.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr const char* kOp = "unpack";
[[noreturn]] void raise_busy(const char* op, const char* arg, i64, i64, i64, const char* note) {
  raise_error("RuntimeError", std::string(op) + ": " + arg +
                                  ": another call, or a server, was consuming the ring; have one "
                                  "follow the other on a stream, or by an event" +
                                  note);
}
[[noreturn]] void raise_broken(const char* op, const char* arg, i64 slot, i64, i64,
                               const char* note) {
  raise_error("RuntimeError", std::string(op) + ": " + arg + ": a push in slot " +
                                  std::to_string(slot) +
                                  " has seals that are not its word, as no producer of both/ring.h "
                                  "leaves them" +
                                  note);
}

const DescriptorSites kSites(true);
const FaultSite kBusy = fault_site(kOp, "descriptors", raise_busy, "nothing was copied");
const FaultSite kBroken = fault_site(kOp, "descriptors", raise_broken, "its server has ended");

// The entry points of unpack_ring.cu.
enum Entry { kConsume, kServe };

KernelTable& kernels() {
  static KernelTable table("unpack_ring", {}, [](const Spec&, int in_flight, int) {
    return GroupShape{32, in_flight, 1, 1};
  });
  return table;
}

// The number of a call, from 1.
u64 new_call() {
  static std::atomic<u64> calls{0};
  return ++calls;
}

// Each call takes the next board, where its blocks meet. If two calls run at the same time, the GPU
// refuses one.
constexpr u32 kBoards = 16'384;

// Offsets in the device memory of a ring, which begins with its RingState; and its size.
struct RingMemory {
  i64 boards, staged, bytes;

  explicit RingMemory(const RingHeader& ring) {
    const auto end_of = [](i64 at, i64 count, size_t each) {
      return ceil_div(at + count * static_cast<i64>(each), 128) * 128;
    };
    boards = end_of(0, 1, sizeof(RingState));
    staged = end_of(boards, kBoards, sizeof(RingBoard));
    bytes = end_of(staged, i64(ring.num_slots) * ring.max_descriptors, sizeof(Descriptor));
  }
};

class RingOnGpu {
 public:
  // `host` is the ring's memory, `state` its device memory.
  RingOnGpu(tvm::ffi::Tensor host, tvm::ffi::Tensor state)
      : host_(std::move(host)), state_(std::move(state)) {
    RingParams& ring = params_.ring;
    ring.ring = *static_cast<const RingHeader*>(host_.data_ptr());
    char* const on_host = const_cast<char*>(memory_range(host_.data_ptr()).device_address);
    ring.base = on_host;
    ring.dones = on_host + ring.ring.dones_at;
    char* const at = static_cast<char*>(state_.data_ptr());
    const RingMemory memory(ring.ring);
    ring.state = reinterpret_cast<RingState*>(at);
    ring.busy = kBusy;
    ring.broken = kBroken;
    params_.staged = reinterpret_cast<Descriptor*>(at + memory.staged);
    boards_ = reinterpret_cast<RingBoard*>(at + memory.boards);
  }

  void consume(AnyView src, AnyView dst, i64 num_slots) {
    const UnpackSides sides = checked_sides(src, dst);
    const CollectiveScope scope(sides.on_gpu().ordinal());
    const Kernel& kernel = kernels().find(scope.device, Spec()).entries[kConsume];
    ConsumeParams params = params_;
    params.ring.call = new_call();
    params.ring.fault = scope.device.fault_device;
    params.unpack = unpack_params(sides, scope.device);
    params.board = boards_ + params.ring.call % kBoards;
    params.most = static_cast<u32>(num_slots);
    // More than a warp per segment does not help.
    const i64 most = num_slots * params.ring.ring.max_descriptors + sides.dst.row_bytes / 512;
    const i64 blocks = std::min<i64>(scope.device.num_sms, ceil_div(32 * most, kernel.num_threads));
    scope.launch(kernel, blocks, params);
    scope.raise_earlier();
  }

  // Queues the server on a stream. It polls `stop`, the address of a u32 in pinned memory.
  void serve(AnyView src, AnyView dst, i64 num_sms, i64 idle_ns, i64 stop, i64 stream) {
    const UnpackSides sides = checked_sides(src, dst);
    Device& device = Device::get(state_.device().device_id);
    check_pending_fault(device);
    const LaunchScope scope(device, reinterpret_cast<CUstream>(stream));
    ServeParams params{params_.ring, unpack_params(sides, device), nullptr,
                       static_cast<u64>(idle_ns)};
    params.ring.call = new_call();
    params.ring.fault = device.fault_device;
    params.stop = reinterpret_cast<const u32*>(
        memory_range(reinterpret_cast<const void*>(stop)).device_address);
    const Kernel& kernel = kernels().find(device, Spec()).entries[kServe];
    scope.launch(kernel, num_sms, params, 1, static_cast<unsigned>(num_sms));
  }

 private:
  UnpackSides checked_sides(AnyView src, AnyView dst) const {
    const UnpackSides sides(src, dst);
    const int ordinal = state_.device().device_id;
    const Rows& on_gpu = sides.src.on_cuda() ? sides.on_gpu() : sides.dst;
    if (!on_gpu.on_cuda() || on_gpu.ordinal() != ordinal) {
      on_gpu.value_error("device " + on_gpu.device_name(),
                         "device cuda:" + std::to_string(ordinal) + ", the ring's");
    }
    sides.check_sizes();
    return sides;
  }

  static UnpackParams unpack_params(const UnpackSides& sides, const Device& device) {
    UnpackParams params = sides.params();
    params.fault = device.fault_device;
    kSites.give_to(params);
    return params;
  }

  tvm::ffi::Tensor host_;
  tvm::ffi::Tensor state_;
  ConsumeParams params_{};
  RingBoard* boards_;
};

// The bytes of device memory that kernels need to consume a ring. All have to be zero.
int64_t ring_state_bytes(int64_t num_slots, int64_t max_descriptors) {
  return RingMemory(ring_layout(static_cast<u32>(num_slots), static_cast<u32>(max_descriptors)))
      .bytes;
}

// Returns consume and serve.
Array<Function> ring_on_gpu(tvm::ffi::Tensor host, tvm::ffi::Tensor state) {
  const auto made = std::make_shared<RingOnGpu>(std::move(host), std::move(state));
  return {method(made, &RingOnGpu::consume), method(made, &RingOnGpu::serve)};
}

// Makes a stream that lives as long as the process.
int64_t make_ring_stream(int64_t ordinal) {
  const ContextScope context(Device::get(static_cast<int>(ordinal)));
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(make_stream(0)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_ring_stream, make_ring_stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_state_bytes, ring_state_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_on_gpu, ring_on_gpu);

}  // namespace jitkern
