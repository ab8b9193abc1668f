// DescriptorRing: the producer for Python, and a consumer on the CPU. The protocol is in
// both/ring.h. Nothing here waits for long: Python calls again, so that Ctrl-C works.
#include <jitkern/both/ring.h>
#include <jitkern/check.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "host/objects.h"
#include "host/workers.h"
#include "ops/unpack_host.h"
#include "ops/unpack_ring.h"

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;

// Returned if there is no ticket.
constexpr i64 kFull = -1;
constexpr i64 kReserved = -2;

constexpr const char* kPush = "DescriptorRing.push";
constexpr const char* kFields[] = {"src_off", "dst_off",    "len",
                                   "count",   "src_stride", "dst_stride"};
constexpr bool kIsShort[] = {false, false, true, true, false, false};

// Converts rows of int64 to descriptors. Returns 0 unless a value is negative or too large.
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
      raise_value_error(
          kPush, "descriptors",
          kFields[c] + (" " + std::to_string(value)) + " of descriptor " + std::to_string(i),
          kIsShort[c] ? "0 to 4294967295" : "0 or more");
    }
  }
  // Another thread has changed them meanwhile.
  raise_value_error(kPush, "descriptors", "values that change", "memory that nobody writes");
}

class DescriptorRing {
 public:
  DescriptorRing(tvm::ffi::Tensor memory)
      : memory_(std::move(memory)), producer_(memory_.data_ptr()), consumer_(memory_.data_ptr()) {}

  // Returns the ticket, kFull or kReserved.
  i64 push(AnyView rows) {
    const Tensor t(kPush, "descriptors", rows);
    const DLTensor& dl = *t.dl;
    if (t.on_cuda()) t.value_error("device " + t.device_name(), "cpu");
    if (dl.dtype.code != kDLInt || dl.dtype.bits != 64 || dl.dtype.lanes != 1) {
      t.type_error("dtype " + t.dtype_name(), "int64");
    }
    const bool is_long = dl.ndim == 2 && dl.shape[1] == 6;
    if (dl.ndim != 2 || (dl.shape[1] != 3 && !is_long)) {
      t.value_error("shape " + t.shape_text(), "[n, 3] or [n, 6]");
    }
    const i64 count = dl.shape[0], columns = dl.shape[1];
    const i64 most = producer_.header().max_descriptors;
    if (count > most) {
      t.value_error(std::to_string(count) + " of them",
                    "at most the " + std::to_string(most) + " of a slot");
    }
    const i64 row_stride = dl.strides == nullptr ? columns : dl.strides[0];
    const i64 stride = dl.strides == nullptr ? 1 : dl.strides[1];
    const i64* const from = reinterpret_cast<const i64*>(t.data());

    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_reserved_) return kReserved;
    Descriptor* const to = producer_.try_reserve();
    if (to == nullptr) return kFull;
    const u64 wrong = is_long ? convert<6>(to, from, count, row_stride, stride)
                              : convert<3>(to, from, count, row_stride, stride);
    if (wrong != 0) refuse(from, count, columns, row_stride, stride);
    return static_cast<i64>(producer_.publish(static_cast<u32>(count)));
  }

  // Reserves the next push for the caller, and sets its first `count` descriptors to one empty row.
  // Returns the ticket, kFull or kReserved.
  i64 reserve(i64 count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_reserved_) return kReserved;
    Descriptor* const to = producer_.try_reserve();
    if (to == nullptr) return kFull;
    std::fill_n(to, count, Descriptor());
    is_reserved_ = true;
    return next();
  }
  // Ends the reservation: pushes `count` descriptors, or nothing if it is negative.
  void publish(i64 count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_reserved_ = false;
    if (count >= 0) producer_.publish(static_cast<u32>(count));
  }

  // Waits until the slot of the next push is free. False after `most_us`.
  bool await_free(i64 most_us) {
    return await(most_us, [&] { return producer_.is_free(producer_.next()); });
  }
  bool await_done(i64 ticket, i64 most_us) {
    return await(most_us, [&] { return producer_.is_done(static_cast<u64>(ticket)); });
  }

  // Consumes up to `num_slots` pushes in order, as unpack_ring.cu does. If a descriptor is out of
  // range, nothing of its push is copied.
  void consume(AnyView src_arg, AnyView dst_arg, i64 num_slots) {
    const UnpackSides sides(src_arg, dst_arg);
    for (const Rows* side : {&sides.src, &sides.dst}) {
      if (side->on_cuda()) side->value_error("device " + side->device_name(), "cpu");
    }
    const std::lock_guard<std::mutex> lock(consuming_);
    for (i64 taken = 0; taken < num_slots; ++taken) {
      u32 count = 0;
      const Descriptor* const from = consumer_.find(next_, &count);
      if (from == nullptr) return;
      take(sides, next_++, from, count);
    }
  }

  i64 next() { return static_cast<i64>(producer_.next()); }

 private:
  // Copies all of a push, or nothing, and completes it. Descriptors are read once: a producer that
  // breaks the protocol cannot change one that was checked.
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
  bool is_reserved_ = false;
};

// Returns a ring's bytes, the offset of its first descriptor, and the bytes of a slot.
Array<int64_t> layout_of_ring(int64_t num_slots, int64_t max_descriptors) {
  const auto found = ring_layout(static_cast<u32>(num_slots), static_cast<u32>(max_descriptors));
  return {found.num_bytes, found.descriptors_at(0), found.slot_bytes};
}

// Makes a ring in memory of zeros. Returns push, reserve, publish, await_free, await_done, consume
// and next.
Array<Function> make_ring(tvm::ffi::Tensor memory, int64_t num_slots, int64_t max_descriptors) {
  ring_init(memory.data_ptr(), static_cast<u32>(num_slots), static_cast<u32>(max_descriptors));
  const auto made = std::make_shared<DescriptorRing>(std::move(memory));
  return {method(made, &DescriptorRing::push),       method(made, &DescriptorRing::reserve),
          method(made, &DescriptorRing::publish),    method(made, &DescriptorRing::await_free),
          method(made, &DescriptorRing::await_done), method(made, &DescriptorRing::consume),
          method(made, &DescriptorRing::next)};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(ring_layout, layout_of_ring);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_ring, make_ring);

}  // namespace jitkern
