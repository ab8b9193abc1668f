// What unpack puts into place: descriptors, as a producer in C++ writes them into memory and the
// kernel reads them there. For host and device; of jitkern it needs the types alone, of the
// standard library nothing. Users may include it.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// Of the layout below. A producer stores it beside its descriptors, and who reads them compares.
constexpr u32 kDescriptorVersion = 1;

// `count` pieces of `len` bytes each: piece i comes from src_off + i * src_stride and goes to
// dst_off + i * dst_stride. Where `len` or `count` is 0 there is nothing to do.
struct alignas(16) Descriptor {
  i64 src_off;  // bytes from the beginning of the source
  i64 dst_off;
  u32 len;
  u32 count = 1;
  i64 src_stride = 0;  // of any sign
  i64 dst_stride = 0;
  i64 reserved = 0;  // up to three vectors of 16 bytes, which the kernel reads
};
static_assert(sizeof(Descriptor) == 48 && alignof(Descriptor) == 16, "as version 1 has it");

}  // namespace jitkern
