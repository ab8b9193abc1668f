// A descriptor: pieces that a kernel, or the CPU, copies. Includes nothing, so that C++ producers
// need nothing else of jitkern. Users may include it.
#pragma once

#ifndef JITKERN_HOST_DEVICE
#ifdef __CUDACC__
#define JITKERN_HOST_DEVICE __host__ __device__
#else
#define JITKERN_HOST_DEVICE
#endif
#endif

namespace jitkern {

// The version of the layout below. Producers store it with their descriptors; readers compare it.
constexpr unsigned kDescriptorVersion = 2;

// Piece i of `count` has `len` bytes and goes from src_off + i * src_stride to dst_off + i *
// dst_stride, all in bytes. There is none if count or len is 0.
//
// A descriptor is one cache line of the CPU, in two halves of 32 bytes, a GPU's sector. Each half
// ends with a seal, which tells the reader of a ring that the half is whole. The ring writes the
// seals (ring.h); producers leave them alone.
struct alignas(64) Descriptor {
  long long src_off = 0;
  long long dst_off = 0;
  unsigned len = 0;
  unsigned count = 1;
  unsigned long long first_seal = 0;
  long long src_stride = 0;
  long long dst_stride = 0;
  unsigned long long reserved = 0;
  unsigned long long second_seal = 0;

  constexpr Descriptor() = default;
  JITKERN_HOST_DEVICE constexpr Descriptor(long long src_off_, long long dst_off_, unsigned len_,
                                           unsigned count_ = 1, long long src_stride_ = 0,
                                           long long dst_stride_ = 0)
      : src_off(src_off_),
        dst_off(dst_off_),
        len(len_),
        count(count_),
        src_stride(src_stride_),
        dst_stride(dst_stride_) {}
};
static_assert(sizeof(Descriptor) == 64, "four vectors of 16 bytes");

// The seals' offsets, for readers that load vectors.
constexpr unsigned kFirstSealAt = 24, kSecondSealAt = 56;
#ifndef __CUDACC_RTC__  // which has no offsetof
static_assert(__builtin_offsetof(Descriptor, first_seal) == kFirstSealAt, "ends the first half");
static_assert(__builtin_offsetof(Descriptor, src_stride) == 32, "begins the second half");
static_assert(__builtin_offsetof(Descriptor, second_seal) == kSecondSealAt, "ends it");
#endif

}  // namespace jitkern
