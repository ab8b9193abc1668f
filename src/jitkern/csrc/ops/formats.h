// The formats of rows that engines keep, each described once for host and device. Names and order
// are those of FORMATS in jitkern/ops/_ops.py.
#pragma once

#include "cache_strides.h"
#include "floats.h"

namespace jitkern {

enum Format : int {
  kFp8DsMla,
  kFp8IndexK,
  kFp8DsV41,
  kFp8DsV41Paged,
  kFp8,
  kFp8PerTokenHead,
  kInt8PerTokenHead
};

// Where the scales of a row lie.
enum class ScalePlace {
  kInRow,     // after the row's values
  kInPage,    // after all values of the page
  kInTensor,  // in a tensor of their own, which a store writes
  kGiven      // in a tensor of their own, which a store reads
};

// Which scale a group of values gets: the largest magnitude among them, at least amax_floor, by the
// payload's largest number; at least scale_floor; with pow2 rounded up to a power of two. In the
// place of 0 it is 1, in the place of a subnormal number, whose inverse overflows, 2^-126.
struct ScaleRule {
  float amax_floor;
  float scale_floor;
  bool pow2;
};

struct RowFormat {
  bool is_int8;     // the payload: int8, or float8_e4m3fn
  int group;        // neighbouring values that share a scale; 0: those of a head
  int scale_bytes;  // 4: fp32; 1: ue8m0, the exponent of a power of two plus 127
  ScalePlace place;
  ScaleRule rule;       // the default
  bool has_other_rule;  // pow2 may be chosen
  bool has_rest;        // bytes beside the values, which are kept as they are

  JITKERN_HOST_DEVICE constexpr float largest() const { return is_int8 ? 127.0f : 448.0f; }
  JITKERN_HOST_DEVICE constexpr bool is_given() const { return place == ScalePlace::kGiven; }
};

JITKERN_HOST_DEVICE constexpr RowFormat row_format(int format) {
  switch (format) {
    case kFp8DsMla:
      return {false, 128, 4, ScalePlace::kInRow, {0, 1e-4f, true}, true, true};
    case kFp8IndexK:
      return {false, 128, 4, ScalePlace::kInPage, {1e-4f, 0, false}, true, false};
    case kFp8DsV41:
      return {false, 32, 1, ScalePlace::kInRow, {0, 1e-4f, true}, false, false};
    case kFp8DsV41Paged:
      return {false, 32, 1, ScalePlace::kInPage, {0, 1e-4f, true}, false, false};
    case kFp8PerTokenHead:
      return {false, 0, 4, ScalePlace::kInTensor, {0, 1e-6f, false}, false, false};
    case kInt8PerTokenHead:
      return {true, 0, 4, ScalePlace::kInTensor, {0, 1e-6f, false}, false, false};
    default:
      return {false, 0, 4, ScalePlace::kGiven, {0, 0, false}, false, false};
  }
}

constexpr int kLaneVecs = 2;  // vectors of a lane, if a group has as many

// How the lanes of a warp share a row of groups. Each group has a team of lanes, a power of two,
// each of which holds `chunks` vectors of `elems` values. Lanes for the rest of the row follow.
struct FormatLanes {
  int team;
  int chunks;
  int of_row;  // a multiple of `team`, so that no team is split over two warps

  JITKERN_HOST_DEVICE constexpr FormatLanes(int groups, int group, i64 rest_bytes, int elems)
      : team(1), chunks(0), of_row(0) {
    while (team < 32 && team * elems * kLaneVecs < group) team *= 2;
    chunks = (group + team * elems - 1) / (team * elems);
    const int rest = static_cast<int>((rest_bytes + elems - 1) / elems);
    of_row = (groups * team + rest + team - 1) / team * team;
  }
};

// Rows of values, and the cache that holds them in a format. Strides are in bytes.
struct FormatTable {
  char* values;
  i64 values_row_stride;
  i64 values_group_stride;
  char* rest;  // rows of bytes that are kept as they are
  i64 rest_row_stride;
  char* payload;
  CacheStrides strides;  // head_stride: from one group to the next
  i64 rest_offset;       // in a row of the cache
  char* scales;
  CacheStrides scale_strides;
};

struct FormatParams {
  FormatTable tables[2];  // K and V, or one alone; blockIdx.y chooses
  const void* indices;
  const void* count;  // number of indices that are used, on the device; or null
  i64 num_rows;
  i64 num_slots;
  i64 skip;  // an index whose row is not stored; negative: none
  ScaleRule rule;
  int count_bytes;
  FaultSite indices_site;
  FaultRecord* fault;
};

JITKERN_HOST_DEVICE inline float larger(float a, float b) { return a < b ? b : a; }

// NaN has no part in it.
JITKERN_HOST_DEVICE inline float larger_magnitude(float amax, float value) {
#ifdef __CUDA_ARCH__
  return fmaxf(amax, fabsf(value));  // one instruction, not three
#else
  const float magnitude = float_of_bits(bits_of_float(value) & 0x7fffffff);
  return amax < magnitude ? magnitude : amax;
#endif
}

// Adding the largest mantissa carries into the exponent unless the mantissa is 0. Logarithms would
// round a number just above a power of two down to it.
JITKERN_HOST_DEVICE inline float scale_of(float amax, float largest, const ScaleRule& rule) {
  const float scale = larger(larger(amax, rule.amax_floor) / largest, rule.scale_floor);
  const float pow2 = float_of_bits((bits_of_float(scale) + 0x7fffff) & 0x7f800000);
  const float chosen = rule.pow2 ? pow2 : scale;
  return chosen == 0 ? 1 : larger(chosen, float_of_bits(1u << 23));
}

// Rounds half away from zero, to -127 to 127; NaN gives 0. What is added is the number before 0.5:
// 0.5 itself would make 1 of the number before 0.5.
JITKERN_HOST_DEVICE inline unsigned char int8_bits(float value) {
  const float half = float_of_bits(0x3effffff | (bits_of_float(value) & 0x80000000));
  const float sum = value + half;
  const float clamped = sum > 127.0f ? 127.0f : sum < -127.0f ? -127.0f : sum;
  return static_cast<unsigned char>(clamped != clamped ? 0 : static_cast<int>(clamped));
}

// Divides numbers by one scale, as `/` does but for the bits of results that float8_e4m3fn rounds
// to 0 or to its largest number.
struct ScaleDivisor {
  float scale;
  float inverse;
  bool is_fast;

  JITKERN_HOST_DEVICE explicit ScaleDivisor(float scale)
      : scale(scale), inverse(1.0f / scale), is_fast(scale > 1e-20f && scale < 1e20f) {}

#ifdef __CUDA_ARCH__
  // If is_fast: the remainder corrects the last bit of the product (Markstein). That takes 3
  // instructions, a division 9 and a branch.
  __device__ float fast_quotient(float value) const {
    const float product = value * inverse;
    const float size = fabsf(product);
    const float corrected = fmaf(fmaf(-scale, product, value), inverse, product);
    return size > 1e-6f && size < 1e6f ? corrected : product;
  }
#endif
};

JITKERN_HOST_DEVICE inline void store_scale(const RowFormat& format, char* address, float scale) {
  if (format.scale_bytes == 1) {
    *address = static_cast<char>(bits_of_float(scale) >> 23);
  } else {
    *reinterpret_cast<float*>(address) = scale;
  }
}

JITKERN_HOST_DEVICE inline float load_scale(const RowFormat& format, const char* address) {
  if (format.scale_bytes == 4) return *reinterpret_cast<const float*>(address);
  const u32 exponent = static_cast<unsigned char>(*address);
  // 255 stands for NaN, 0 for 2^-127, which is subnormal.
  return float_of_bits(exponent == 255 ? 0x7fc00000 : exponent == 0 ? 0x400000 : exponent << 23);
}

}  // namespace jitkern
