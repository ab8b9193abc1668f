// Merges partial results of attention. The output is, for each row [token, head], the mean of the
// partials' values, weighted by exp(lse); the new lse is the logarithm of the weights' sum.
//
// A thread loads one vector of a row from up to 8 partials before it uses any: one trip to memory.
// With more partials, further teams of threads read 8 each, and the first team sums up in order.
// Every thread of a row computes the weights, which is free beside the loads.
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

template <int kDim, int kElems, int kIn, int kOut, int kLse, int kCapacity, bool kPlain,
          int kThreads, int kMaxOccupancy, bool kUsePdl, int kRowThreads>
struct Merge {
  using Params = MergeParams<kCapacity>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static constexpr int kStates = kCapacity < kStatesOfThread ? kCapacity : kStatesOfThread;
  static constexpr int kTeams = kCapacity / kStates;
  static constexpr int kTeamThreads = kThreads / kTeams;
  static constexpr int kVecs = kDim / kElems;
  static constexpr int kSteps = (kVecs + kRowThreads - 1) / kRowThreads;  // of long rows
  static_assert(kDim % kElems == 0, "a row is a whole number of vectors");
  static_assert(kTeamThreads * kTeams == kThreads && kTeamThreads % kRowThreads == 0,
                "each thread has a row");

  static constexpr int kInBytes = kElems * item_bytes_of(kIn);
  static constexpr int kOutBytes = kElems * item_bytes_of(kOut);
  using InVec = Vec<kInBytes>;

  struct Shared {
    Weight weights[kTeams][kTeamThreads];
    float values[kTeams][kElems][kTeamThreads];
  };

  static __device__ void run(const Params& p) {
    const int team = kTeams == 1 ? 0 : static_cast<int>(threadIdx.x) / kTeamThreads;
    const int member = static_cast<int>(threadIdx.x) - team * kTeamThreads;
    const int lane = member % kRowThreads;
    const Place place(p.to, blockIdx.x * p.to.rows_of_block + member / kRowThreads);
    const PartialState* const states = p.states + team * kStates;
    wait_for_earlier_kernels<kUsePdl>();

    const bool is_copy = kCapacity == 2 && !kPlain && place.token >= p.to.tokens_of_first;
    const int end = !place.is_row ? 0 : kPlain ? p.to.num_states : num_valid(p.to, place.token);
    const auto is_there = [&](int s) {
      // A plain call has at least two partials.
      if (kPlain && kCapacity == 2) return place.is_row;
      return is_copy <= team * kStates + s && team * kStates + s < end;
    };

    // One loop for each step: all loads are issued before the first use.
    Bits<kLse> logs[kStates];
    i64 at = place.offset(p.states[0].lse_strides);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      logs[s] = bits_as<kLse>(-float_of_bits(0x7f800000));
      if (!is_there(s)) continue;
      if (!kPlain) at = place.offset(states[s].lse_strides);
      logs[s] = *reinterpret_cast<const Bits<kLse>*>(states[s].lse + at);
    }
    InVec vecs[kStates];
    const auto load = [&](int vec) {
      at = place.offset(p.states[0].out_strides);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        vecs[s] = InVec{};
        if (!is_there(s) || vec >= kVecs) continue;
        if (!kPlain) at = place.offset(states[s].out_strides);
        vecs[s] = reinterpret_cast<const InVec*>(states[s].out + at)[vec];
      }
    };
    load(lane);
    const float scale = kOut == kFloat8E4M3 ? *p.to.scale : 1.0f;
    let_next_kernel_start<kUsePdl>();

    const float lse_of_copy = float_of<kLse>(logs[1]);
    if (is_copy) logs[1] = 0;  // the second partial counts, even if its lse is -inf or NaN
    float shares[kStates];
    Weight own = weigh(logs, shares, p.to.log2_of_base);
    if (is_copy) own.log = lse_of_copy;
    for (int step = 0;; load(lane + ++step * kRowThreads)) {
      float values[kElems];
      add_up(vecs, shares, own.sum, values);
      const Weight all = with_other_teams(team, member, own, values, p.to.log2_of_base);
      const int vec = lane + step * kRowThreads;
      const bool writes = place.is_row && team == 0 && vec < kVecs;
      if (step == 0 && p.to.lse_is_in_place) __syncthreads();
      if (writes && vec == 0 && p.to.lse != nullptr) {
        const float sum_log = center_of(all.log) + log2_of(all.sum) * p.to.base_log_of_2;
        const float log = all.sum == 1.0f ? all.log : sum_log;  // keeps the sign of a zero
        at = place.offset(p.to.lse_strides);
        store_float(p.to.lse + at, p.to.lse_type, log);
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

  static __device__ int num_valid(const MergeTarget& to, u32 token) {
    if (to.num_valid == nullptr) return to.num_states;
    const u32 at = to.valid_per_token ? token : 0;
    const i64 count = to.num_valid_bytes == 4 ? static_cast<const i32*>(to.num_valid)[at]
                                              : static_cast<const i64*>(to.num_valid)[at];
    return count < 0 ? 0 : static_cast<int>(count < to.num_states ? count : to.num_states);
  }

  static __device__ Weight weigh(const Bits<kLse>* logs, float* shares, float log2_of_base) {
    Weight all{-float_of_bits(0x7f800000), 0.0f};
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      shares[s] = log_of(float_of<kLse>(logs[s]));
      all.log = fmaxf(all.log, shares[s]);  // of a number and NaN it is the number
    }
    const float center = center_of(all.log);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      shares[s] = share_of(shares[s], center, log2_of_base);
      all.sum += shares[s];
    }
    share_out<kStates>(all.sum, shares);
    return all;
  }

  // Normalises the shares before they multiply values, so that large values do not overflow.
  template <int kCount>
  static __device__ void share_out(float sum, float* shares) {
    const float factor = sum == 0.0f ? 0.0f : inverse_of(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) shares[i] *= factor;
  }

  // Sums start from -0, so that the zeros of a single partial keep their signs.
  static __device__ void start(float sum, float* values) {
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = sum == 0.0f ? 0.0f : -0.0f;
  }

  // A partial of weight 0 is ignored, even if its values are NaN.
  static __device__ void add(float share, const float* from, float* values) {
    if (share == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = fmaf(share, from[i], values[i]);
  }

  static __device__ void add_up(const InVec* vecs, const float* shares, float sum, float* values) {
    start(sum, values);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      float from[kElems];
      floats_of<kIn, kElems>(Words<kInBytes>(vecs[s]), from);
      add(shares[s], from, values);
    }
  }

  // All threads call it. The first team gets the weight and `values` of all teams together.
  static __device__ Weight with_other_teams(int team, int member, Weight own, float* values,
                                            float log2_of_base) {
    if constexpr (kTeams == 1) return own;
    __shared__ Shared shared;
    __syncthreads();  // the last step's values are read
    shared.weights[team][member] = own;
#pragma unroll
    for (int i = 0; i < kElems; ++i) shared.values[team][i][member] = values[i];
    __syncthreads();
    if (team != 0) return own;
    Weight all{own.log, 0.0f};
#pragma unroll
    for (int t = 1; t < kTeams; ++t) all.log = fmaxf(all.log, shared.weights[t][member].log);
    float shares[kTeams];
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const Weight weight = shared.weights[t][member];
      // A NaN lse is lost in the maximum, but weight.sum keeps it: 0 times NaN is NaN.
      shares[t] = share_of(weight.log, center_of(all.log), log2_of_base) * weight.sum;
      all.sum += shares[t];
    }
    share_out<kTeams>(all.sum, shares);
    start(all.sum, values);
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      float from[kElems];
#pragma unroll
      for (int i = 0; i < kElems; ++i) from[i] = shared.values[t][i][member];
      add(shares[t], from, values);
    }
    return all;
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
