// What goes where: the rows that one descriptor has a kernel, or the CPU, copy. Includes nothing,
// so that a C++ producer needs no more of jitkern, and kernels can have it. Users may include it.
#pragma once

namespace jitkern {

// Row i of `count` goes from src_off + i * src_stride to dst_off + i * dst_stride, all in bytes,
// and has `len` of them. No row where count is 0, one where it is 1, whose strides mean nothing.
struct alignas(16) Descriptor {
  long long src_off;
  long long dst_off;
  unsigned len;
  unsigned count;
  long long src_stride;
  long long dst_stride;
};
static_assert(sizeof(Descriptor) == 48 && alignof(Descriptor) == 16, "three vectors of 16 bytes");

}  // namespace jitkern
