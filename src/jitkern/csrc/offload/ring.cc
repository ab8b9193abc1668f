// DescriptorRing: the producer for Python, a consumer on the CPU, and the launches of kernels that
// consume, once per call or as a server until it is stopped. both/ring.h describes the protocol. No
// wait is long: Python repeats it, so that Ctrl-C works.
#include <jitkern/both/ring.h>
#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "host/objects.h"
#include "host/staging.h"
#include "ops/unpack_host.h"
#include "ops/unpack_ring.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr const char* kPush = "DescriptorRing.push";
constexpr const char* kFields[] = {"src_off", "dst_off",    "len",
                                   "count",   "src_stride", "dst_stride"};
constexpr bool kIsShort[] = {false, false, true, true, false, false};

// Converts rows of int64 to descriptors. Returns nonzero if a value is negative or too large.
template <int kColumns>
u64 convert(Descriptor* to, const i64* from, i64 count, i64 row_stride, i64 stride) {
  u64 signs = 0, high = 0;
  for (i64 i = 0; i < count; ++i, from += row_stride) {
    i64 row[6] = {0, 0, 0, 1, 0, 0};
    for (int c = 0; c < kColumns; ++c) row[c] = from[c * stride];
    to[i] = {row[0], row[1], static_cast<u32>(row[2]), static_cast<u32>(row[3]), row[4], row[5]};
    signs |= static_cast<u64>(row[0] | row[1] | row[4] | row[5]);
    high |= static_cast<u64>(row[2] | row[3]);
  }
  return signs >> 63 | high >> 32;
}

// Names the wrong value.
[[noreturn]] void refuse(const i64* from, i64 count, i64 columns, i64 row_stride, i64 stride) {
  for (i64 i = 0; i < count; ++i) {
    for (i64 c = 0; c < columns; ++c) {
      const i64 value = from[i * row_stride + c * stride];
      if (value >= 0 && (!kIsShort[c] || value >> 32 == 0)) continue;
      raise_value_error(kPush, "descriptors", str(kFields[c], " ", value, " of descriptor ", i),
                        kIsShort[c] ? "0 to 4294967295" : "0 or more");
    }
  }
  // Another thread has changed them since.
  raise_value_error(kPush, "descriptors", "values that change", "memory that nobody writes");
}

class DescriptorRing {
 public:
  DescriptorRing(tvm::ffi::Tensor memory)
      : memory_(std::move(memory)), producer_(memory_.data_ptr()), consumer_(memory_.data_ptr()) {}

  // Returns the ticket, or -1 while the slot is in use.
  i64 push(AnyView rows) {
    const Tensor t(kPush, "descriptors", rows);
    const DLTensor& dl = *t.dl;
    if (t.on_cuda()) t.value_error("device " + t.device_name(), "cpu");
    if (!t.has_dtype(kDLInt, 64)) {
      t.dtype_error("int64");
    }
    const bool is_long = dl.ndim == 2 && dl.shape[1] == 6;
    if (dl.ndim != 2 || (dl.shape[1] != 3 && !is_long)) {
      t.shape_error("[n, 3] or [n, 6]");
    }
    const i64 count = dl.shape[0], columns = dl.shape[1];
    const i64 most = producer_.header().max_descriptors;
    if (count > most) {
      t.value_error(str(count, " of them"), str("at most the ", most, " of a slot"));
    }
    const i64 row_stride = dl.strides == nullptr ? columns : dl.strides[0];
    const i64 stride = dl.strides == nullptr ? 1 : dl.strides[1];
    const i64* const from = reinterpret_cast<const i64*>(t.data());

    const std::lock_guard<std::mutex> lock(mutex_);
    Descriptor* const to = producer_.try_reserve();
    if (to == nullptr) return -1;
    const u64 wrong = is_long ? convert<6>(to, from, count, row_stride, stride)
                              : convert<3>(to, from, count, row_stride, stride);
    if (wrong != 0) refuse(from, count, columns, row_stride, stride);
    return static_cast<i64>(producer_.publish(static_cast<u32>(count)));
  }

  // Waits until the slot of the next push is free. False after `most_us`.
  bool await_free(i64 most_us) {
    return await(most_us, [&] { return producer_.is_free(producer_.next()); });
  }
  // Waits until a push is consumed: 1, or 0 after `most_us`; -1 if it was not pushed yet.
  i64 await_done(i64 ticket, i64 most_us) {
    if (ticket >= next()) return -1;
    return await(most_us, [&] { return producer_.is_done(static_cast<u64>(ticket)); });
  }

  // Consumes up to `max_pushes` pushes in order, as unpack_ring.cu does. If a descriptor is out of
  // range, nothing of its push is copied.
  void consume(AnyView src_arg, AnyView dst_arg, i64 max_pushes) {
    const UnpackSides sides(src_arg, dst_arg);
    for (const Rows* side : {&sides.src, &sides.dst}) {
      if (side->on_cuda()) side->value_error("device " + side->device_name(), "cpu");
    }
    const std::lock_guard<std::mutex> lock(consuming_);
    for (i64 taken = 0; taken < max_pushes; ++taken) {
      u32 count = 0;
      const Descriptor* const from = consumer_.find(next_, &count);
      if (from == nullptr) return;
      take(sides, next_++, from, count);
    }
  }

  i64 next() { return static_cast<i64>(producer_.next()); }

 private:
  // Copies a push completely, or nothing if a descriptor is out of range, and completes it. Each
  // descriptor is copied before its check: a producer that breaks the protocol cannot change it
  // afterwards.
  void take(const UnpackSides& sides, u64 ticket, const Descriptor* from, u32 count) {
    std::vector<Pieces> list;
    list.reserve(count);
    for (u32 i = 0; i < count; ++i) {
      const Descriptor& d = from[i];
      const Pieces pieces{d.src_off, d.dst_off, d.len, d.count, d.src_stride, d.dst_stride};
      const Verdict verdict = verdict_on(pieces, sides.src.row_bytes, sides.dst.row_bytes);
      if (verdict.part != kNumParts) {
        consumer_.complete(ticket);  // so that the ring continues
        raise_out_of_range(true, ring_position(consumer_.header().slot(ticket), i), verdict);
      }
      if (!pieces.empty()) list.push_back(simplified(pieces));
    }
    unpack_by_cpu(sides.dst.data, sides.src.data, list);
    consumer_.complete(ticket);
  }

  template <class IsThere>
  static bool await(i64 most_us, const IsThere& is_there) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::microseconds(most_us);
    for (Backoff backoff; !is_there(); backoff.wait()) {
      if (Clock::now() >= end) return false;
    }
    return true;
  }

  tvm::ffi::Tensor memory_;
  RingProducer producer_;
  RingConsumer consumer_;
  std::mutex mutex_;  // guards pushes
  std::mutex consuming_;
  u64 next_ = 0;  // the next ticket to consume
};

i64 ring_bytes(u32 num_slots, u32 max_descriptors) {
  return ring_layout(num_slots, max_descriptors).num_bytes;
}

// Makes a ring in zeroed memory. Returns push, await_free, await_done, consume and next.
Array<Function> make_ring(tvm::ffi::Tensor memory, u32 num_slots, u32 max_descriptors) {
  ring_init(memory.data_ptr(), num_slots, max_descriptors);
  const auto ring = std::make_shared<DescriptorRing>(std::move(memory));
  return {method(ring, &DescriptorRing::push), method(ring, &DescriptorRing::await_free),
          method(ring, &DescriptorRing::await_done), method(ring, &DescriptorRing::consume),
          method(ring, &DescriptorRing::next)};
}

// -- consumed by kernels -------------------------------------------------------------------------

[[noreturn]] void raise_busy(const char* op, const char* arg, i64, i64, i64, const char* note) {
  raise_error("RuntimeError", str(op, ": ", arg,
                                  ": another call, or a server, was consuming the ring; have one "
                                  "follow the other on a stream, or by an event",
                                  note));
}
[[noreturn]] void raise_broken(const char* op, const char* arg, i64 slot, i64, i64,
                               const char* note) {
  raise_error("RuntimeError", str(op, ": ", arg, ": a push in slot ", slot,
                                  " has seals that are not its word, as no producer of both/ring.h "
                                  "leaves them",
                                  note));
}

const DescriptorSites kSites(true);
const FaultSite kBusy = fault_site("unpack", "descriptors", raise_busy, "nothing was copied");
const FaultSite kBroken = fault_site("unpack", "descriptors", raise_broken, "its server has ended");

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

// Each call uses the next board to synchronise its blocks. If two calls run at the same time, the
// GPU refuses one.
constexpr u32 kBoards = 16'384;

// Offsets in the device memory of a ring, which starts with its RingState, and its size.
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
    ring.base = memory_range(host_.data_ptr()).device_address;
    ring.dones = const_cast<char*>(ring.base) + ring.ring.dones_at;
    char* const at = static_cast<char*>(state_.data_ptr());
    const RingMemory memory(ring.ring);
    ring.state = reinterpret_cast<RingState*>(at);
    ring.busy = kBusy;
    ring.broken = kBroken;
    params_.staged = reinterpret_cast<Descriptor*>(at + memory.staged);
    boards_ = reinterpret_cast<RingBoard*>(at + memory.boards);
  }

  void consume(AnyView src, AnyView dst, i64 max_pushes) {
    const UnpackSides sides = checked_sides(src, dst);
    const CollectiveScope scope(sides.on_gpu().ordinal());
    const Kernel& kernel = kernels().find(scope.device, Spec()).entries[kConsume];
    ConsumeParams params = params_;
    params.ring.call = new_call();
    params.ring.fault = scope.device.fault_device;
    params.unpack = unpack_params(sides, scope.device);
    params.board = boards_ + params.ring.call % kBoards;
    params.most = static_cast<u32>(max_pushes);
    // More than a warp per segment does not help.
    const i64 most = max_pushes * params.ring.ring.max_descriptors + sides.dst.row_bytes / 512;
    const i64 blocks = std::min<i64>(scope.device.num_sms, ceil_div(32 * most, kernel.num_threads));
    scope.launch(kernel, blocks, params);
    scope.raise_earlier();
  }

  // Queues the server on a stream. It polls `stop`, the address of a u32 in pinned memory.
  void serve(AnyView src, AnyView dst, i64 idle_ns, i64 stop, i64 stream) {
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
    scope.launch(kernels().find(device, Spec()).entries[kServe], 1, params);
  }

 private:
  UnpackSides checked_sides(AnyView src, AnyView dst) const {
    const UnpackSides sides(src, dst);
    const int ordinal = state_.device().device_id;
    const Rows& on_gpu = sides.src.on_cuda() ? sides.on_gpu() : sides.dst;
    if (!on_gpu.on_cuda() || on_gpu.ordinal() != ordinal) {
      on_gpu.value_error("device " + on_gpu.device_name(),
                         str("device cuda:", ordinal, ", the ring's"));
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
i64 ring_state_bytes(u32 num_slots, u32 max_descriptors) {
  return RingMemory(ring_layout(num_slots, max_descriptors)).bytes;
}

// Returns consume and serve.
Array<Function> ring_on_gpu(tvm::ffi::Tensor host, tvm::ffi::Tensor state) {
  const auto ring = std::make_shared<RingOnGpu>(std::move(host), std::move(state));
  return {method(ring, &RingOnGpu::consume), method(ring, &RingOnGpu::serve)};
}

// Makes a stream that lives as long as the process.
int64_t make_ring_stream(int ordinal) {
  const ContextScope context(Device::get(ordinal));
  return reinterpret_cast<int64_t>(make_stream(0));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_bytes, ring_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_ring, make_ring);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_ring_stream, make_ring_stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_state_bytes, ring_state_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_on_gpu, ring_on_gpu);

}  // namespace jitkern
