// Parameters of the kernel that merges partial results of attention.
#pragma once

#include "floats.h"

namespace jitkern {

constexpr int kMostStates = 64;
// Partials that one thread reads; with more, several threads read so many each.
constexpr int kStatesOfThread = 8;

// In bytes.
struct HeadStrides {
  i64 token;
  i64 head;

  JITKERN_HOST_DEVICE i64 offset(i64 token_number, i64 head_number) const {
    return token_number * token + head_number * head;
  }
};

// One partial result: rows [token, head] of values, and a number for each.
struct PartialState {
  const char* out;
  const char* lse;
  HeadStrides out_strides;
  HeadStrides lse_strides;
};

// Division of numbers below 2^31 by one known before the launch: two instructions, not 20.
struct Divisor {
  u32 value;
  u32 factor;
  u32 shift;

  // n / value = n * factor >> shift, where factor = 2^shift / value, rounded up, has 32 bits.
  JITKERN_HOST_DEVICE static Divisor of(u32 value) {
    u32 log2 = 0;
    while ((u64(1) << log2) < value) ++log2;
    const u32 shift = 31 + log2;
    return {value, static_cast<u32>((u64(1) << shift) / value + 1), shift};
  }
  JITKERN_HOST_DEVICE u32 quotient(u32 n) const {
    return static_cast<u32>(u64(n) * factor >> shift);
  }
};

// Rows without keys have an lse of +inf in FlashAttention 2 and vLLM, -inf elsewhere.
JITKERN_HOST_DEVICE inline float log_of(float lse) {
  const float infinity = float_of_bits(0x7f800000);
  return lse == infinity ? -infinity : lse;
}

struct MergeTarget {
  char* out;
  char* lse;  // null: not asked for
  HeadStrides out_strides;
  HeadStrides lse_strides;
  const float* scale;     // what values are divided by, or null
  const void* num_valid;  // how many of the partials count, or null
  i32 num_valid_bytes;    // 4 or 8
  bool valid_per_token;   // or one for all
  bool lse_is_in_place;   // some thread reads what another one writes
  i32 num_states;
  i32 lse_type;         // of FloatType
  float log2_of_base;   // what a number times this is a logarithm to base 2
  float base_log_of_2;  // its inverse
  u32 num_rows;
  u32 rows_of_block;
  u32 tokens_of_first;  // of two partials: later tokens have the second one's row as it is
  Divisor heads;
};

template <int kCapacity>
struct MergeParams {
  MergeTarget to;
  PartialState states[kCapacity];
};

}  // namespace jitkern
