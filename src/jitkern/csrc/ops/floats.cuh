// Vectors of floating-point numbers to and from float, on a GPU.
#pragma once

#include <jitkern/copy.cuh>

#include "floats.h"

namespace jitkern {

// Converts two neighbouring values. The first is in the lower half of `pair`.
template <int kType>
__device__ inline void floats_of_pair(u32 pair, float* values) {
#ifndef JITKERN_EMULATED
  if constexpr (kType == kFloat16) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; "
        "cvt.f32.f16 %1, high; }"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(pair));
    return;
  }
#endif
  values[0] = float_of<kType>(static_cast<Bits<kType>>(pair));
  values[1] = float_of<kType>(static_cast<Bits<kType>>(pair >> 16));
}

// Rounds two values to a 16-bit type, by one instruction.
template <int kType>
__device__ inline u32 rounded_pair(const float* values) {
#ifndef JITKERN_EMULATED
  u32 pair;
  if constexpr (kType == kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[1]), "f"(values[0]));
    return pair;
  }
  if constexpr (kType == kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[1]), "f"(values[0]));
    return pair;
  }
#endif
  return bits_as<kType>(values[0]) | u32(bits_as<kType>(values[1])) << 16;
}

// Rounds two values to float8_e4m3fn.
__device__ inline u32 rounded_pair_of_e4m3(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(values[1]), "f"(values[0]));
  return pair;
#else
  return bits_as<kFloat8E4M3>(values[0]) | u32(bits_as<kFloat8E4M3>(values[1])) << 8;
#endif
}

// Converts two neighbouring values of float8_e4m3fn. NaN stays NaN, of any bits.
__device__ inline void floats_of_e4m3_pair(u32 pair, float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
  floats_of_pair<kFloat16>(halves, values);
#else
  values[0] = float_of<kFloat8E4M3>(static_cast<unsigned char>(pair));
  values[1] = float_of<kFloat8E4M3>(static_cast<unsigned char>(pair >> 8));
#endif
}

// A vector as words of 32 bits. A vector of less than 4 bytes is the lower part of one word.
template <int kBytes>
union Words {
  Vec<kBytes> vec;
  u32 words[kBytes < 4 ? 1 : kBytes / 4];

  __device__ Words() : words{} {}
  __device__ explicit Words(Vec<kBytes> vec) : words{} { this->vec = vec; }
};

// The values of a vector of a type with 16 or 32 bits.
template <int kType, int kCount>
__device__ inline void floats_of(const Words<kCount * item_bytes_of(kType)>& from, float* values) {
  if constexpr (kType == kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = float_of_bits(from.words[i]);
  } else if constexpr (kCount == 1) {
    values[0] = float_of<kType>(static_cast<Bits<kType>>(from.words[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) floats_of_pair<kType>(from.words[i / 2], values + i);
  }
}

template <int kCount>
__device__ inline void floats_of_e4m3(const Words<kCount>& from, float* values) {
  if constexpr (kCount == 1) {
    values[0] = float_of<kFloat8E4M3>(static_cast<unsigned char>(from.words[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      floats_of_e4m3_pair(from.words[i / 4] >> (i % 4 * 8), values + i);
    }
  }
}

// Rounds values to a vector of any type.
template <int kType, int kCount>
__device__ inline Words<kCount * item_bytes_of(kType)> words_of(const float* values) {
  Words<kCount * item_bytes_of(kType)> to;
  if constexpr (kCount == 1) {
    to.words[0] = bits_as<kType>(values[0]);
  } else if constexpr (kType == kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.words[i] = bits_of_float(values[i]);
  } else if constexpr (kType == kFloat8E4M3) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      to.words[i / 4] |= rounded_pair_of_e4m3(values + i) << (i % 4 * 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) to.words[i / 2] = rounded_pair<kType>(values + i);
  }
  return to;
}

}  // namespace jitkern
