// Merges partial results of attention. The output is, for each row [token, head], the mean of the
// partials' values, weighted by exp(lse); the new lse is the logarithm of the weights' sum.
//
// A thread loads one vector of a row from up to 8 partials before it uses any: one trip to memory.
// merge.cc merges more than 8 in groups. Every thread of a row computes the weights, which is free
// beside the loads.
#include <jitkern/pdl.cuh>

#include "floats.cuh"
#include "merge.h"

namespace jitkern {

// The GPU's approximate functions, right to 2 ulp. With the exact ones a kernel of two partials
// takes 1.5 times as long, as it is no longer bound by memory.
#ifdef JITKERN_EMULATED
inline float exp2_of(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline float inverse_of(float x) { return 1.0f / x; }
#else
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// The total weight of some partials: base^log * sum, where `log` is their largest lse.
struct Weight {
  float log;
  float sum;
};

// The lse to subtract. It is -inf if all partials are empty, and -inf must not be subtracted.
__device__ inline float center_of(float largest) {
  return largest == -float_of_bits(0x7f800000) ? 0.0f : largest;
}

// The weight of `log` relative to `center`: 0 for -inf, NaN for NaN.
__device__ inline float share_of(float log, float center, float log2_of_base) {
  return exp2_of((log - center) * log2_of_base);
}

template <int kDim, int kElems, int kIn, int kOut, int kCapacity, bool kPlain, int kThreads,
          int kMaxOccupancy, bool kUsePdl, int kRowThreads>
struct Merge {
  using Params = MergeParams<kCapacity>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static constexpr int kVecs = kDim / kElems;
  static constexpr int kSteps = (kVecs + kRowThreads - 1) / kRowThreads;  // 1, more for long rows
  static_assert(kCapacity <= kMostStates, "the vectors of all partials fit the registers");
  static_assert(kDim % kElems == 0, "a row is a whole number of vectors");
  static_assert(kThreads % kRowThreads == 0, "each thread has a row");

  static constexpr int kInBytes = kElems * item_bytes_of(kIn);
  static constexpr int kOutBytes = kElems * item_bytes_of(kOut);
  using InVec = Vec<kInBytes>;

  static __device__ void run(const Params& p) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kRowThreads;
    const Place place(p.to, blockIdx.x * p.to.rows_of_block + thread / kRowThreads);
    wait_for_earlier_kernels<kUsePdl>();

    const bool is_copy = kCapacity == 2 && !kPlain && place.token >= p.to.tokens_of_first;
    const int end = place.is_row ? p.to.num_states : 0;
    const auto is_there = [&](int s) {
      // A plain call has at least two partials.
      if (kPlain && kCapacity == 2) return place.is_row;
      return is_copy <= s && s < end;
    };

    // One loop for each step: all loads are issued before the first use.
    float logs[kCapacity];
    i64 at = place.offset(p.states[0].lse_strides);
#pragma unroll
    for (int s = 0; s < kCapacity; ++s) {
      logs[s] = -float_of_bits(0x7f800000);
      if (!is_there(s)) continue;
      if (!kPlain) at = place.offset(p.states[s].lse_strides);
      logs[s] = *reinterpret_cast<const float*>(p.states[s].lse + at);
    }
    InVec vecs[kCapacity];
    const auto load = [&](int vec) {
      at = place.offset(p.states[0].out_strides);
#pragma unroll
      for (int s = 0; s < kCapacity; ++s) {
        vecs[s] = InVec{};
        if (!is_there(s) || vec >= kVecs) continue;
        if (!kPlain) at = place.offset(p.states[s].out_strides);
        vecs[s] = reinterpret_cast<const InVec*>(p.states[s].out + at)[vec];
      }
    };
    load(lane);
    const float scale = kOut == kFloat8E4M3 ? *p.to.scale : 1.0f;
    let_next_kernel_start<kUsePdl>();

    const float lse_of_copy = logs[1];
    if (is_copy) logs[1] = 0.0f;  // the second partial counts, even if its lse is -inf or NaN
    float shares[kCapacity];
    Weight weight = weigh(logs, shares, p.to.log2_of_base);
    if (is_copy) weight.log = lse_of_copy;
    for (int step = 0;; load(lane + ++step * kRowThreads)) {
      float values[kElems];
      add_up(vecs, shares, weight.sum, values);
      const int vec = lane + step * kRowThreads;
      const bool writes = place.is_row && vec < kVecs;
      if (step == 0 && p.to.lse_is_in_place) __syncthreads();
      if (writes && vec == 0 && p.to.lse != nullptr) {
        const float sum_log = center_of(weight.log) + log2_of(weight.sum) * p.to.base_log_of_2;
        const float log = weight.sum == 1.0f ? weight.log : sum_log;  // keeps the sign of a zero
        at = place.offset(p.to.lse_strides);
        *reinterpret_cast<float*>(p.to.lse + at) = log;
      }
      if (writes) {
        at = place.offset(p.to.out_strides);
        store(p.to.out + at + vec * kOutBytes, values, scale);
      }
      if (step + 1 == kSteps) return;
    }
  }

 private:
  // A thread's row. In a plain call rows are equally spaced in every tensor.
  struct Place {
    u32 row;
    u32 token;
    u32 head;
    bool is_row;

    __device__ Place(const MergeTarget& to, u32 row) : row(row), is_row(row < to.num_rows) {
      if constexpr (kPlain) return;
      token = to.heads.quotient(row);
      head = row - token * to.heads.value;
    }
    __device__ i64 offset(const HeadStrides& strides) const {
      return kPlain ? row * strides.head : token * strides.token + head * strides.head;
    }
  };

  // Sets each partial's share of the total weight, which it returns.
  static __device__ Weight weigh(const float* logs, float* shares, float log2_of_base) {
    Weight total{-float_of_bits(0x7f800000), 0.0f};
#pragma unroll
    for (int s = 0; s < kCapacity; ++s) {
      shares[s] = log_of(logs[s]);
      total.log = fmaxf(total.log, shares[s]);  // fmaxf ignores NaN; the sum below does not
    }
    const float center = center_of(total.log);
#pragma unroll
    for (int s = 0; s < kCapacity; ++s) {
      shares[s] = share_of(shares[s], center, log2_of_base);
      total.sum += shares[s];
    }
    // Shares are normalised before they multiply values, so that large values do not overflow.
    const float factor = total.sum == 0.0f ? 0.0f : inverse_of(total.sum);
#pragma unroll
    for (int s = 0; s < kCapacity; ++s) shares[s] *= factor;
    return total;
  }

  static __device__ void add_up(const InVec* vecs, const float* shares, float sum, float* values) {
    // Sums start from -0, so that the zeros of a single partial keep their signs.
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = sum == 0.0f ? 0.0f : -0.0f;
#pragma unroll
    for (int s = 0; s < kCapacity; ++s) {
      float from[kElems];
      floats_of<kIn, kElems>(Words<kInBytes>(vecs[s]), from);
      if (shares[s] == 0.0f) continue;  // a partial of weight 0 is ignored, even if it holds NaN
#pragma unroll
      for (int i = 0; i < kElems; ++i) values[i] = fmaf(shares[s], from[i], values[i]);
    }
  }

  static __device__ void store(char* to, float* values, float scale) {
    if constexpr (kOut == kFloat8E4M3) {
      const float factor = inverse_of(scale);
#pragma unroll
      for (int i = 0; i < kElems; ++i) values[i] *= factor;
    }
    constexpr int kPartBytes = kOutBytes < 16 ? kOutBytes : 16;
    constexpr int kPartElems = kPartBytes / item_bytes_of(kOut);
#pragma unroll
    for (int i = 0; i < kElems; i += kPartElems) {
      store_vec<kPartBytes>(to + i * item_bytes_of(kOut),
                            words_of<kOut, kPartElems>(values + i).vec);
    }
  }
};

}  // namespace jitkern
