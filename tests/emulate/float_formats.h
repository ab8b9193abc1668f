// Floating-point types by their definition, slowly and in double: what floats.h and the kernels
// that use it are compared with. Of theirs only the types' names are used.
#pragma once

#include <jitkern/types.h>

#include <cmath>
#include <limits>

#include "ops/floats.h"

namespace emulate {

using jitkern::u32;

struct FloatFormat {
  int bits;
  int mantissa;        // bits behind the point
  int least_exponent;  // of normal numbers
  double largest;
  bool has_infinity;
};

inline FloatFormat format_of(int type) {
  switch (type) {
    case jitkern::kFloat32:
      return {32, 23, -126, std::numeric_limits<float>::max(), true};
    case jitkern::kFloat16:
      return {16, 10, -14, 65504, true};
    case jitkern::kBFloat16:
      return {16, 7, -126, std::ldexp(255, 127 - 7), true};
    default:
      return {8, 3, -6, 448, false};
  }
}

inline double value_of_bits(int type, u32 bits) {
  const FloatFormat format = format_of(type);
  const u32 size = bits & ((1u << (format.bits - 1)) - 1);
  const double sign = bits >> (format.bits - 1) & 1 ? -1 : 1;
  const u32 fraction = size & ((1u << format.mantissa) - 1);
  const int exponent = static_cast<int>(size >> format.mantissa);
  const u32 lines = (1u << (format.bits - 1)) - (format.has_infinity ? 1u << format.mantissa : 1);
  if (size > lines || (size == lines && !format.has_infinity)) return std::nan("");
  if (size == lines) return sign * std::numeric_limits<double>::infinity();
  const double digits = exponent == 0 ? fraction : fraction + (1u << format.mantissa);
  const int places = std::max(exponent, 1) - 1 + format.least_exponent - format.mantissa;
  return sign * std::ldexp(digits, places);
}

// The nearest number that the type has, of two as near the even one. It rises with `value`.
inline double rounded_to(int type, double value) {
  const FloatFormat format = format_of(type);
  if (std::isnan(value)) return value;
  double result = value;
  if (value != 0 && !std::isinf(value)) {
    const int exponent = std::max(std::ilogb(value), format.least_exponent);
    const int places = exponent - format.mantissa;
    result = std::ldexp(std::nearbyint(std::ldexp(value, -places)), places);
  }
  if (std::fabs(result) <= format.largest) return std::copysign(result, value);
  const double beyond =
      format.has_infinity ? std::numeric_limits<double>::infinity() : format.largest;
  return std::copysign(beyond, value);
}

// Of a number that the type has; of NaN any.
inline u32 bits_of_value(int type, double value) {
  const FloatFormat format = format_of(type);
  const u32 sign = std::signbit(value) ? 1u << (format.bits - 1) : 0;
  const u32 size_bits = (1u << (format.bits - 1)) - 1;
  if (std::isnan(value)) return size_bits;
  if (std::isinf(value)) return sign | (size_bits >> format.mantissa << format.mantissa);
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), format.least_exponent);
  const u32 digits =
      static_cast<u32>(std::ldexp(std::fabs(value), format.mantissa - exponent));  // with a 1.
  return sign | ((static_cast<u32>(exponent - format.least_exponent) << format.mantissa) + digits);
}

}  // namespace emulate
