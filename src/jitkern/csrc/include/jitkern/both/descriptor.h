// A descriptor: pieces that a kernel, or the CPU, copies. Includes nothing, so that a C++ producer
// needs no more of jitkern. Users may include it.
#pragma once

#ifndef JITKERN_HOST_DEVICE
#ifdef __CUDACC__
#define JITKERN_HOST_DEVICE __host__ __device__
#else
#define JITKERN_HOST_DEVICE
#endif
#endif

namespace jitkern {

// The version of the layout below. Producers store it beside their descriptors; readers compare it.
constexpr unsigned kDescriptorVersion = 2;

// Piece i of `count` has `len` bytes and goes from src_off + i * src_stride to dst_off + i *
// dst_stride, all in bytes. There is none if count or len is 0.
//
// It is a line of the CPU, in two halves of 32 bytes, a GPU's sector. Each half ends with a seal,
// by which the reader of a ring sees that the half is whole. The ring writes the seals (ring.h);
// producers leave them alone.
struct alignas(64) Descriptor {
  long long src_off;
  long long dst_off;
  unsigned len;
  unsigned count;
  unsigned long long first_seal;
  long long src_stride;
  long long dst_stride;
  unsigned long long reserved;
  unsigned long long second_seal;

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

// For readers by vectors.
constexpr unsigned kFirstSealAt = 24, kSecondSealAt = 56;
#ifndef __CUDACC_RTC__  // which has no offsetof
static_assert(__builtin_offsetof(Descriptor, first_seal) == kFirstSealAt, "ends the first half");
static_assert(__builtin_offsetof(Descriptor, src_stride) == 32, "begins the second half");
static_assert(__builtin_offsetof(Descriptor, second_seal) == kSecondSealAt, "ends it");
#endif

}  // namespace jitkern
