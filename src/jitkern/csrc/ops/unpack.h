// Parameters of the kernel of unpack, and checks of descriptors on host and device.
#pragma once

#include <jitkern/both/descriptor.h>
#include <jitkern/types.h>

namespace jitkern {

// int64 in a descriptor: (src_off, dst_off, len), and (count, src_stride, dst_stride).
enum DescriptorFormat : int { kTriples = 3, kSextuples = 6 };

// The part of a descriptor that is out of range.
enum DescriptorPart : int { kSrcPart, kDstPart, kLenPart, kCountPart, kNumParts };

struct UnpackParams {
  char* dst;
  const char* src;
  i64 dst_bytes;
  i64 src_bytes;
  const void* descriptors;
  const void* count;  // in device memory: the number of descriptors that are used; null: all
  u32 num_descriptors;
  i32 count_bytes;   // 4 or 8
  u32 num_copiers;   // blocks; further ones copy the rests of long descriptors
  bool reads_host;   // `src` is in host memory
  bool writes_host;  // `dst` is in host memory
  FaultSite sites[kNumParts];
  FaultRecord* fault;
};

// A descriptor, read once.
struct Pieces {
  i64 src_off;
  i64 dst_off;
  i64 len;
  i64 count;
  i64 src_stride;
  i64 dst_stride;

  JITKERN_HOST_DEVICE bool empty() const { return len == 0 || count == 0; }
};

constexpr i64 kMostInt = ~0ull >> 1;

// a * b, clamped to 64 bits.
JITKERN_HOST_DEVICE inline u64 product(u64 a, u64 b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b) == 0 ? a * b : ~0ull;
#else
  u64 exact = 0;
  return __builtin_mul_overflow(a, b, &exact) ? ~0ull : exact;
#endif
}

// The bytes that pieces cover on one side, clamped to 64 bits: past the end of any memory.
struct Reach {
  i64 begin;
  i64 end;
};

JITKERN_HOST_DEVICE inline Reach reach_of(i64 offset, i64 len, i64 count, i64 stride) {
  const u64 step = stride < 0 ? 0 - static_cast<u64>(stride) : static_cast<u64>(stride);
  const u64 distance = product(static_cast<u64>(count - 1), step);
  const i64 span = distance > static_cast<u64>(kMostInt) ? kMostInt : static_cast<i64>(distance);
  const auto above = [](i64 a, i64 b) { return a > kMostInt - b ? kMostInt : a + b; };
  if (stride < 0) {
    const i64 least = -kMostInt - 1;
    return {offset < least + span ? least : offset - span, above(offset, len)};
  }
  return {offset, above(above(offset, len), span)};
}

// The kernel counts in 32 bits: vectors of several pieces, or segments (32 vectors) of one piece.
constexpr i64 kMostVectors = (1ll << 32) - 4096;
constexpr i64 kMostBytes = kMostVectors * 32 * 16;

// The part of a descriptor that is wrong (kNumParts: none), its value and its bound.
struct Verdict {
  DescriptorPart part;
  i64 value;
  i64 bound;
};

JITKERN_HOST_DEVICE inline Verdict verdict_on(const Pieces& pieces, i64 src_bytes, i64 dst_bytes) {
  if (pieces.len < 0) return {kLenPart, pieces.len, kMostInt};
  if (pieces.count < 0) return {kCountPart, pieces.count, kMostInt};
  if (pieces.empty()) return {kNumParts, 0, 0};
  const Reach from = reach_of(pieces.src_off, pieces.len, pieces.count, pieces.src_stride);
  if (from.begin < 0) return {kSrcPart, from.begin, src_bytes};
  if (from.end > src_bytes) return {kSrcPart, from.end, src_bytes};
  const Reach to = reach_of(pieces.dst_off, pieces.len, pieces.count, pieces.dst_stride);
  if (to.begin < 0) return {kDstPart, to.begin, dst_bytes};
  if (to.end > dst_bytes) return {kDstPart, to.end, dst_bytes};
  const bool is_one = pieces.dst_stride == 0 || pieces.count == 1 ||
                      (pieces.src_stride == pieces.len && pieces.dst_stride == pieces.len);
  const u64 vectors =
      product(static_cast<u64>(pieces.count), static_cast<u64>(pieces.len) / 16 + 2);
  if (!is_one && vectors > static_cast<u64>(kMostVectors)) {
    return {kCountPart, pieces.count, kMostVectors / (pieces.len / 16 + 2)};
  }
  return {kNumParts, 0, 0};
}

// A valid descriptor in as few pieces as possible.
JITKERN_HOST_DEVICE inline Pieces simplified(Pieces pieces) {
  if (pieces.empty()) return {0, 0, 0, 0, 0, 0};
  if (pieces.src_stride == pieces.len && pieces.dst_stride == pieces.len) {
    pieces.len *= pieces.count;
    pieces.count = 1;
  }
  if (pieces.dst_stride == 0) pieces.count = 1;  // one destination for all: any may win
  return pieces;
}

}  // namespace jitkern
