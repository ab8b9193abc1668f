// Partial results of attention, merged: of each row [token, head] the mean of all partials' values,
// weighted by the exponential of their lse, and the logarithm of the weights' sum as a new lse.
//
// A thread has one vector of a row, of up to 8 partials, and loads all before it uses any: one trip
// to memory. Of more partials others, of another team, read 8 each, and the first team adds up what
// they found, in order. The weights are computed by every thread of a row, which costs nothing
// beside the loads: one exponential for 16 bytes.
#include <jitkern/pdl.cuh>

#include "floats.cuh"
#include "merge.h"

namespace jitkern {

// What partials weigh together: base^log * sum, where `log` is the largest lse of theirs.
struct Weight {
  float log;
  float sum;
};

// Of partials that are all empty the lse is -inf, as whose difference nothing is known.
__device__ inline float center_of(float largest) {
  return largest == -float_of_bits(0x7f800000) ? 0.0f : largest;
}

// What `log` weighs beside `center`. An infinite one is all there is; -inf is nothing; NaN is NaN.
__device__ inline float share_of(float log, float center, float log2_of_base) {
  return log == center ? 1.0f : exp2f((log - center) * log2_of_base);
}

template <int kDim, int kElems, int kIn, int kOut, int kLse, int kCapacity, int kThreads,
          int kMaxOccupancy, bool kUsePdl, int kRows>
struct Merge {
  using Params = MergeParams<kCapacity>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static constexpr int kStates = kCapacity < kStatesOfThread ? kCapacity : kStatesOfThread;
  static constexpr int kTeams = kCapacity / kStates;
  static constexpr int kTeamThreads = kThreads / kTeams;
  static constexpr int kRowThreads = kTeamThreads / kRows;
  static constexpr int kVecs = kDim / kElems;
  static constexpr int kSteps = (kVecs + kRowThreads - 1) / kRowThreads;  // of long rows
  static_assert(kDim % kElems == 0, "a row is a whole number of vectors");
  static_assert(kTeams * kRows * kRowThreads == kThreads, "each thread has a row");

  static constexpr int kInBytes = kElems * item_bytes_of(kIn);
  static constexpr int kOutBytes = kElems * item_bytes_of(kOut);
  using InVec = Vec<kInBytes>;

  struct Shared {
    Weight weights[kTeams][kTeamThreads];
    float values[kTeams][kElems][kTeamThreads];
  };

  static __device__ void run(const Params& p) {
    const int team = static_cast<int>(threadIdx.x) / kTeamThreads;
    const int member = static_cast<int>(threadIdx.x) % kTeamThreads;
    const int lane = member % kRowThreads;
    const u32 row = blockIdx.x * kRows + member / kRowThreads;
    const bool is_row = row < p.to.num_rows;
    const u32 token_of_launch = p.to.heads.quotient(row);
    const i64 head = row - token_of_launch * p.to.heads.value;
    const i64 token = p.to.first_token + token_of_launch;
    wait_for_earlier_kernels<kUsePdl>();

    const int first = token < p.to.tokens_of_first ? 0 : 1;
    const int behind = is_row ? num_valid(p.to, token) : 0;
    const PartialState* const states = p.states + team * kStates;
    const auto is_there = [&](int s) {
      return first <= team * kStates + s && team * kStates + s < behind;
    };

    // Straight-line loops: what is loaded is used behind all of them.
    Bits<kLse> logs[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      logs[s] = bits_as<kLse>(-float_of_bits(0x7f800000));
      if (!is_there(s)) continue;
      const char* from =
          states[s].lse + token * states[s].lse_token_stride + head * states[s].lse_head_stride;
      logs[s] = *reinterpret_cast<const Bits<kLse>*>(from);
    }
    InVec vecs[kStates];
    const auto load = [&](int vec) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        vecs[s] = InVec{};
        if (!is_there(s) || vec >= kVecs) continue;
        const char* from =
            states[s].out + token * states[s].out_token_stride + head * states[s].out_head_stride;
        vecs[s] = __ldcs(reinterpret_cast<const InVec*>(from) + vec);
      }
    };
    load(lane);
    const float scale = kOut == kFloat8E4M3 ? *p.to.scale : 1.0f;
    let_next_kernel_start<kUsePdl>();

    float shares[kStates];
    const Weight own = weigh(logs, shares, p.to.log2_of_base);
    for (int step = 0;; load(lane + ++step * kRowThreads)) {
      float values[kElems];
      add_up(vecs, shares, values);
      const Weight all = with_other_teams(team, member, own, values, p.to.log2_of_base);
      const int vec = lane + step * kRowThreads;
      if (step == 0 && p.to.lse_is_in_place) __syncthreads();
      if (is_row && team == 0 && vec == 0 && p.to.lse != nullptr) {
        const float log = center_of(all.log) + log2f(all.sum) * p.to.base_log_of_2;
        store_float(p.to.lse + token * p.to.lse_token_stride + head * p.to.lse_head_stride,
                    p.to.lse_type, log);
      }
      if (is_row && team == 0 && vec < kVecs) {
        char* to = p.to.out + token * p.to.out_token_stride + head * p.to.out_head_stride;
        store(to + i64(vec) * kOutBytes, values, all.sum, scale);
      }
      if (step + 1 == kSteps) return;
    }
  }

 private:
  static __device__ int num_valid(const MergeTarget& to, i64 token) {
    if (to.num_valid == nullptr) return to.num_states;
    const i64 at = to.valid_per_token ? token : 0;
    const i64 count = to.num_valid_bytes == 4 ? static_cast<const i32*>(to.num_valid)[at]
                                              : static_cast<const i64*>(to.num_valid)[at];
    return count < 0 ? 0 : static_cast<int>(count < to.num_states ? count : to.num_states);
  }

  static __device__ Weight weigh(const Bits<kLse>* logs, float* shares, float log2_of_base) {
    Weight all{-float_of_bits(0x7f800000), 0.0f};
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      shares[s] = float_of<kLse>(logs[s]);
      all.log = fmaxf(all.log, shares[s]);  // of a number and NaN it is the number
    }
    const float center = center_of(all.log);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      shares[s] = share_of(shares[s], center, log2_of_base);
      all.sum += shares[s];
    }
    return all;
  }

  // What weighs nothing counts nothing, whatever it is.
  static __device__ void add(float share, const float* from, float* values) {
    if (share == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = fmaf(share, from[i], values[i]);
  }

  static __device__ void add_up(const InVec* vecs, const float* shares, float* values) {
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = -0.0f;  // one alone keeps its zeros' signs
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      float from[kElems];
      floats_of<kIn, kElems>(Words<kInBytes>(vecs[s]), from);
      add(shares[s], from, values);
    }
  }

  // To be called by all threads. In the first team: what all weigh, and `values` of all.
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
    float largest = own.log;
    for (int t = 1; t < kTeams; ++t) largest = fmaxf(largest, shared.weights[t][member].log);
    const float center = center_of(largest);
    Weight all{largest, 0.0f};
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] = -0.0f;
    for (int t = 0; t < kTeams; ++t) {
      const Weight weight = shared.weights[t][member];
      float share = share_of(weight.log, center, log2_of_base);
      if (weight.sum != weight.sum) share = weight.sum;  // NaN, which no largest lse shows
      if (share != 0.0f) all.sum = fmaf(share, weight.sum, all.sum);
      float from[kElems];
#pragma unroll
      for (int i = 0; i < kElems; ++i) from[i] = shared.values[t][i][member];
      add(share, from, values);
    }
    return all;
  }

  static __device__ void store(char* to, const float* values, float sum, float scale) {
    const float factor = 1.0f / (kOut == kFloat8E4M3 ? sum * scale : sum);
    float means[kElems];
#pragma unroll
    for (int i = 0; i < kElems; ++i) means[i] = sum == 0.0f ? 0.0f : values[i] * factor;
    constexpr int kPartBytes = kOutBytes < 16 ? kOutBytes : 16;
    constexpr int kPartElems = kPartBytes / item_bytes_of(kOut);
#pragma unroll
    for (int i = 0; i < kElems; i += kPartElems) {
      __stcs(reinterpret_cast<Vec<kPartBytes>*>(to + i * item_bytes_of(kOut)),
             words_of<kOut, kPartElems>(means + i).vec);
    }
  }
};

}  // namespace jitkern
