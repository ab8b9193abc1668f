// What goes where: the pieces that one descriptor has a kernel, or the CPU, copy. Includes nothing,
// so that a C++ producer needs no more of jitkern, and kernels can have it. Users may include it.
#pragma once

namespace jitkern {

// Of the layout below. A producer stores it beside its descriptors, and who reads them compares.
constexpr unsigned kDescriptorVersion = 1;

// Piece i of `count` goes from src_off + i * src_stride to dst_off + i * dst_stride, all in bytes,
// and has `len` of them. None where count or len is 0; of one the strides mean nothing.
struct alignas(16) Descriptor {
  long long src_off;
  long long dst_off;
  unsigned len;
  unsigned count = 1;
  long long src_stride = 0;
  long long dst_stride = 0;
};
static_assert(sizeof(Descriptor) == 48 && alignof(Descriptor) == 16, "three vectors of 16 bytes");

}  // namespace jitkern
