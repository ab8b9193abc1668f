// Conversions between float and the bits of other floating-point types. They have no branches, so
// that CPU compilers vectorise them. GPUs have instructions for them: floats.cuh.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

enum FloatType : int { kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

JITKERN_HOST_DEVICE constexpr int item_bytes_of(int type) {
  return type == kFloat32 ? 4 : type == kFloat8E4M3 ? 1 : 2;
}

template <int kType>
JITKERN_HOST_DEVICE constexpr auto any_bits() {
  if constexpr (kType == kFloat32) return u32(0);
  if constexpr (kType == kFloat16 || kType == kBFloat16) return static_cast<unsigned short>(0);
  if constexpr (kType == kFloat8E4M3) return static_cast<unsigned char>(0);
}
template <int kType>
using Bits = decltype(any_bits<kType>());

JITKERN_HOST_DEVICE inline float float_of_bits(u32 bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

JITKERN_HOST_DEVICE inline u32 bits_of_float(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

// A float as bits of a smaller type, rounded to even. The type has kMantissa bits of mantissa, and
// 2^kLeastExponent is its least normal number. From `beyond` on the result is `overflow`.
template <int kMantissa, int kLeastExponent>
JITKERN_HOST_DEVICE inline u32 rounded_bits(float value, u32 beyond, u32 overflow, u32 nan) {
  constexpr u32 kDropped = 23 - kMantissa;
  const u32 bits = bits_of_float(value);
  const u32 size = bits & 0x7fffffff;
  const u32 half = (1u << (kDropped - 1)) - 1 + (size >> kDropped & 1);
  const u32 normal = ((size + half) >> kDropped) - (u32(kLeastExponent + 126) << kMantissa);
  // Adding a float whose last bit is the least subnormal number rounds to a multiple of it.
  const u32 shift = u32(kLeastExponent - kMantissa + 23 + 127) << 23;
  const u32 subnormal = bits_of_float(float_of_bits(size) + float_of_bits(shift)) - shift;
  u32 result = size < (u32(kLeastExponent + 127) << 23) ? subnormal : normal;
  result = size >= beyond ? overflow : result;
  return size > 0x7f800000 ? nan : result;
}

template <int kType>
JITKERN_HOST_DEVICE inline float float_of(Bits<kType> bits) {
  if constexpr (kType == kFloat32) {
    return float_of_bits(bits);
  } else if constexpr (kType == kBFloat16) {
    return float_of_bits(u32(bits) << 16);
  } else if constexpr (kType == kFloat8E4M3) {
    const u32 size = u32(bits & 0x7f) << 20;
    const u32 finite = bits_of_float(float_of_bits(size) * float_of_bits((127u + 120) << 23));
    const u32 nan = 0x7fc00000;
    return float_of_bits(((bits & 0x7f) == 0x7f ? nan : finite) | u32(bits & 0x80) << 24);
  } else {
    const u32 size = u32(bits & 0x7fff) << 13;
    // The factor adds the difference of the exponent biases and normalises subnormal numbers.
    const u32 finite = bits_of_float(float_of_bits(size) * float_of_bits((127u + 112) << 23));
    return float_of_bits((size >= 0x7c00u << 13 ? size | 0x7f800000 : finite) | u32(bits & 0x8000)
                                                                                    << 16);
  }
}

// Rounds to even. Numbers too large for float8_e4m3fn become its largest, 448.
template <int kType>
JITKERN_HOST_DEVICE inline Bits<kType> bits_as(float value) {
  const u32 bits = bits_of_float(value);
  if constexpr (kType == kFloat32) {
    return bits;
  } else if constexpr (kType == kBFloat16) {
    const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<Bits<kType>>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
  } else if constexpr (kType == kFloat16) {
    const u32 size = rounded_bits<10, -14>(value, 0x477ff000, 0x7c00, 0x7e00);
    return static_cast<Bits<kType>>(size | (bits >> 16 & 0x8000));
  } else {
    const u32 size = rounded_bits<3, -6>(value, 0x43e00000, 0x7e, 0x7f);
    const u32 sign = bits >> 24 & 0x80;
    return static_cast<Bits<kType>>(size == 0x7f ? size : size | sign);  // GPUs drop NaN's sign
  }
}

}  // namespace jitkern
