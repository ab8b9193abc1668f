// Where a slot of a KV cache lies, in the layouts of engines. For host and device.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// Divides numbers below 2^31 by a value known before the launch, in 2 instructions instead of 20.
struct Divisor {
  u32 value;
  u32 factor;
  u32 shift;

  // n / value = n * factor >> shift, where factor = 2^shift / value, rounded up, has 32 bits.
  JITKERN_HOST_DEVICE static Divisor of(u32 value) {
    u32 log2 = 0;
    while ((u64(1) << log2) < value) ++log2;
    const u32 shift = 31 + log2;
    return {value, static_cast<u32>((u64(1) << shift) / value + 1), shift};
  }
  JITKERN_HOST_DEVICE u32 quotient(u32 n) const {
    return static_cast<u32>(u64(n) * factor >> shift);
  }
};

// The strides of a cache in bytes. In pages, slot block * page + offset lies at block *
// block_stride
// + offset * slot_stride; else all slots are slot_stride apart.
struct CacheStrides {
  i64 block_stride;
  i64 slot_stride;
  i64 head_stride;  // from head to head of a row, if heads lie apart
  Divisor page;     // slots of a page

  template <bool kPaged>
  JITKERN_HOST_DEVICE i64 offset_of(i64 slot) const {
    if constexpr (!kPaged) return slot * slot_stride;
    const u32 number = static_cast<u32>(slot);
    const u32 block = page.quotient(number);
    return block * block_stride + i64(number - block * page.value) * slot_stride;
  }

  // The offset in a row of its byte `at`; kHeadBytes is kRowBytes if heads follow each other.
  template <i64 kRowBytes, i64 kHeadBytes>
  JITKERN_HOST_DEVICE i64 place_of(i32 at) const {
    if constexpr (kHeadBytes == kRowBytes) return at;
    constexpr i32 kHead = static_cast<i32>(kHeadBytes);
    return at / kHead * head_stride + at % kHead;
  }
};

}  // namespace jitkern
