// What goes where: the pieces that one descriptor has a kernel, or the CPU, copy. Includes nothing,
// so that a C++ producer needs no more of jitkern, and kernels can have it. Users may include it.
#pragma once

#ifndef JITKERN_HOST_DEVICE
#ifdef __CUDACC__
#define JITKERN_HOST_DEVICE __host__ __device__
#else
#define JITKERN_HOST_DEVICE
#endif
#endif

namespace jitkern {

// Of the layout below. A producer stores it beside its descriptors, and who reads them compares.
constexpr unsigned kDescriptorVersion = 2;

// Piece i of `count` goes from src_off + i * src_stride to dst_off + i * dst_stride, all in bytes,
// and has `len` of them. None where count or len is 0; of one the strides mean nothing.
//
// It is a line of the CPU, in two halves of 32 bytes, which is what a GPU reads memory in: a
// sector. Each half ends with a seal, by which a reader of a ring tells that the half is whole. The
// ring writes the seals (ring.h); a producer leaves them alone, and elsewhere they mean nothing.
struct alignas(64) Descriptor {
  long long src_off;
  long long dst_off;
  unsigned len;
  unsigned count;
  unsigned long long first_seal;
  long long src_stride;
  long long dst_stride;
  unsigned long long reserved;  // nothing, so far
  unsigned long long second_seal;

  // By default one empty piece.
  JITKERN_HOST_DEVICE constexpr Descriptor() : Descriptor(0, 0, 0) {}
  JITKERN_HOST_DEVICE constexpr Descriptor(long long src_off_, long long dst_off_, unsigned len_,
                                           unsigned count_ = 1, long long src_stride_ = 0,
                                           long long dst_stride_ = 0)
      : src_off(src_off_),
        dst_off(dst_off_),
        len(len_),
        count(count_),
        first_seal(0),
        src_stride(src_stride_),
        dst_stride(dst_stride_),
        reserved(0),
        second_seal(0) {}
};
static_assert(sizeof(Descriptor) == 64, "four vectors of 16 bytes");

// For those who read it as vectors.
constexpr unsigned kFirstSealAt = 24, kSecondSealAt = 56;
#ifndef __CUDACC_RTC__  // which has no offsetof
static_assert(__builtin_offsetof(Descriptor, first_seal) == kFirstSealAt, "ends the first half");
static_assert(__builtin_offsetof(Descriptor, src_stride) == 32, "begins the second half");
static_assert(__builtin_offsetof(Descriptor, second_seal) == kSecondSealAt, "ends it");
#endif

}  // namespace jitkern
