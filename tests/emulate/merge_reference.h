// A row of merged partial results in double, and how far from it float may be.
#pragma once

#include <cmath>
#include <limits>

#include "buffers.h"
#include "ops/merge.h"

namespace emulate {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Types are FloatType. Rounding is floats.h's, which tests/ops/test_merge.py compares with
// PyTorch's.
inline double value_of_bits(int type, u32 bits) {
  switch (type) {
    case kFloat32:
      return float_of_bits(bits);
    case kFloat16:
      return float_of<kFloat16>(static_cast<unsigned short>(bits));
    case kBFloat16:
      return float_of<kBFloat16>(static_cast<unsigned short>(bits));
  }
  return float_of<kFloat8E4M3>(static_cast<unsigned char>(bits));
}
inline u32 bits_of_value(int type, double value) {
  const float rounded = static_cast<float>(value);
  switch (type) {
    case kFloat32:
      return bits_of_float(rounded);
    case kFloat16:
      return bits_as<kFloat16>(rounded);
    case kBFloat16:
      return bits_as<kBFloat16>(rounded);
  }
  return bits_as<kFloat8E4M3>(rounded);
}
inline double rounded_to(int type, double value) {
  return value_of_bits(type, bits_of_value(type, value));
}

inline u32 load_bits(const char* from, int type) {
  u32 bits = 0;
  std::memcpy(&bits, from, item_bytes_of(type));
  return bits;
}
inline double load_number(const char* from, int type) {
  return value_of_bits(type, load_bits(from, type));
}
inline void store_number(char* to, int type, double value) {
  const u32 bits = bits_of_value(type, value);
  std::memcpy(to, &bits, item_bytes_of(type));
}

// A number that lies between two that are as near to the right one as float has to come, rounded.
// Where there is no slack it is that number, bit by bit.
inline void expect_number(const char* what, const char* from, int type, double right,
                          double slack) {
  const u32 bits = load_bits(from, type);
  const double got = value_of_bits(type, bits);
  const double low = rounded_to(type, right - slack), high = rounded_to(type, right + slack);
  if (std::isnan(right) ? std::isnan(got)
      : slack == 0      ? bits == bits_of_value(type, low)
                        : low <= got && got <= high) {
    return;
  }
  fail(std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(right) +
       " within " + std::to_string(slack));
}

// What the partials of a row weigh.
class Weights {
 public:
  // `logs`: the partials' lse; -inf or +inf: it does not count.
  Weights(std::vector<double> logs, double log2_of_base) {
    std::replace(logs.begin(), logs.end(), kInfinity, -kInfinity);
    double largest = -kInfinity;
    for (const double log : logs) largest = std::fmax(largest, log);
    for (const double log : logs) {
      of.push_back(log == -kInfinity ? 0
                   : log == largest  ? 1
                                     : std::exp2((log - largest) * log2_of_base));
      sum += of.back();
      num += of.back() != 0;
    }
    // A single partial keeps its lse, even the sign of a zero.
    log = sum == 0 ? -kInfinity : num == 1 ? largest : largest + std::log2(sum) / log2_of_base;
    if (std::isnan(sum)) log = sum;
  }

  // The second partial alone, whatever its lse.
  static Weights of_copy(double log) {
    Weights weights({-kInfinity, 0}, 1);
    weights.log = log;
    return weights;
  }

  std::vector<double> of;
  double sum = 0;
  double log = 0;
  int num = 0;  // weights that are not 0
};

// An exponential of float is of a number that is rounded: by so much of a weight.
constexpr double kSlack = 2e-5;

// One element of a row, of as many values as there are weights.
struct Mean {
  double value;
  double slack;
};
inline Mean mean_of(const Weights& weights, const std::vector<double>& values) {
  if (weights.num == 0) return {0, 0};
  double sum = -0.0, size = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (weights.of[i] == 0) continue;
    sum += weights.of[i] * values[i];
    if (std::isfinite(values[i])) size += std::fabs(weights.of[i] * values[i]);
  }
  return {sum / weights.sum, weights.num == 1 ? 0 : kSlack * size / weights.sum};
}

}  // namespace emulate
