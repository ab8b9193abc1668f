// Parameters of the kernel that merges partial results of attention.
#pragma once

#include "cache_strides.h"
#include "floats.h"

namespace jitkern {

// The most partials of one launch. A thread reads all partials of a row, and 8 of its vectors fill
// the registers.
constexpr int kMostStates = 8;

// In bytes.
struct HeadStrides {
  i64 token;
  i64 head;
};

// One partial result: rows [token, head] of values, and an fp32 lse for each row.
struct PartialState {
  const char* out;
  const char* lse;
  HeadStrides out_strides;
  HeadStrides lse_strides;
};

// -inf for rows without keys, for which FlashAttention 2 and vLLM give +inf.
JITKERN_HOST_DEVICE inline float log_of(float lse) {
  const float infinity = float_of_bits(0x7f800000);
  return lse == infinity ? -infinity : lse;
}

struct MergeTarget {
  char* out;
  char* lse;  // or null
  HeadStrides out_strides;
  HeadStrides lse_strides;
  const float* scale;    // values are divided by it; or null
  bool lse_is_in_place;  // a thread may write an lse before another thread of the row reads it
  i32 num_states;
  float log2_of_base;   // lse times this is a logarithm to base 2
  float base_log_of_2;  // its inverse
  u32 num_rows;
  u32 rows_of_block;
  u32 tokens_of_first;  // merge_state: later tokens have no first partial and copy the second
  Divisor heads;
};

template <int kCapacity>
struct MergeParams {
  MergeTarget to;
  PartialState states[kCapacity];
};

}  // namespace jitkern
