// merge_state and merge_states on the CPU: row by row, by loops that the compiler vectorises.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "host/cpu_copy.h"
#include "merge_host.h"

namespace jitkern {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Values that are added up before they go to memory: they stay in L1, and the loops over them are
// long enough.
constexpr i64 kPartDim = 512;

const char* row_of(const HeadRows& rows, i64 token, i64 head) {
  return rows.data + token * rows.token_stride_bytes + head * rows.head_stride_bytes;
}

float load_lse(const char* from, int type) {
  float value = 0;
  if (type == kFloat32) {
    std::memcpy(&value, from, 4);
    return value;
  }
  unsigned short bits = 0;
  std::memcpy(&bits, from, 2);
  return type == kFloat16 ? float_of<kFloat16>(bits) : float_of<kBFloat16>(bits);
}

void store_lse(char* to, int type, float value) {
  const unsigned short half =
      type == kFloat16 ? bits_as<kFloat16>(value) : bits_as<kBFloat16>(value);
  type == kFloat32 ? std::memcpy(to, &value, 4) : std::memcpy(to, &half, 2);
}

// What each partial of a row weighs, and all together: see merge.cu, which does the same.
struct Shares {
  float of[kMostStates];
  float sum = 0;
  float lse = -kInfinity;

  Shares(const MergeCall& call, i64 token, i64 head, i64 behind) {
    if (token >= call.tokens_of_first) {  // the second of two as it is
      of[0] = 0;
      of[1] = sum = 1;
      lse = load_lse(row_of(call.lses[1], token, head), call.lse_type);
      return;
    }
    float largest = -kInfinity;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = -kInfinity;
      if (i < behind) of[i] = log_of(load_lse(row_of(call.lses[i], token, head), call.lse_type));
      largest = std::fmax(largest, of[i]);
    }
    const float center = largest == -kInfinity ? 0 : largest;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = std::exp2((of[i] - center) * call.log2_of_base);
      sum += of[i];
    }
    const float factor = sum == 0 ? 0 : 1 / sum;
    for (i64 i = 0; i < call.num_states(); ++i) of[i] *= factor;
    // One alone keeps its own, to the sign of a zero.
    lse = sum == 1 ? largest : center + std::log2(sum) * call.base_log_of_2;
  }
};

template <int kIn>
void add(const char* from, float share, float* values, i64 count) {
  const auto* items = reinterpret_cast<const Bits<kIn>*>(from);
  for (i64 d = 0; d < count; ++d) values[d] += share * float_of<kIn>(items[d]);
}

template <int kOut>
void store(char* to, const float* values, float factor, i64 count) {
  auto* items = reinterpret_cast<Bits<kOut>*>(to);
  for (i64 d = 0; d < count; ++d) items[d] = bits_as<kOut>(values[d] * factor);
}

// In the order of FloatType.
constexpr void (*kAdd[])(const char*, float, float*, i64) = {add<kFloat32>, add<kFloat16>,
                                                             add<kBFloat16>};
constexpr void (*kStore[])(char*, const float*, float, i64) = {
    store<kFloat32>, store<kFloat16>, store<kBFloat16>, store<kFloat8E4M3>};

void merge_row(const MergeCall& call, const Shares& shares, float scale, i64 token, i64 head) {
  const auto add_part = kAdd[call.in_type];
  const auto store_part = kStore[call.out_type];
  char* const to =
      call.out->data + token * call.out->token_stride_bytes + head * call.out->head_stride_bytes;
  float values[kPartDim];
  for (i64 begin = 0; begin < call.dim; begin += kPartDim) {
    const i64 count = std::min(kPartDim, call.dim - begin);
    std::fill_n(values, count, shares.sum == 0 ? 0.0f : -0.0f);
    for (i64 i = 0; i < call.num_states(); ++i) {
      if (shares.of[i] == 0) continue;
      const char* const from = row_of(call.outs[i], token, head);
      add_part(from + begin * item_bytes_of(call.in_type), shares.of[i], values, count);
    }
    store_part(to + begin * item_bytes_of(call.out_type), values, 1 / scale, count);
  }
}

void merge_rows(const MergeCall& call, i64 begin, i64 end) {
  const float scale = call.scale ? *reinterpret_cast<const float*>(call.scale->data()) : 1;
  for (i64 row = begin; row < end; ++row) {
    const i64 token = row / call.out->heads, head = row % call.out->heads;
    i64 behind = call.num_states();
    if (call.num_valid) {
      call.num_valid->with_index([&](const auto at) {
        behind = std::min(behind, at(call.num_valid->count > 1 ? token : 0));
      });
    }
    const Shares shares(call, token, head, behind);
    merge_row(call, shares, scale, token, head);
    if (!call.lse) continue;
    char* const to =
        call.lse->data + token * call.lse->token_stride_bytes + head * call.lse->head_stride_bytes;
    store_lse(to, call.merged_lse_type, shares.lse);
  }
}

}  // namespace

void merge_by_cpu(const MergeCall& call) {
  const i64 rows = call.out->tokens * call.out->heads;
  const i64 bytes = rows * (call.num_states() * call.outs[0].row_bytes + call.out->row_bytes);
  const auto run = [&call](i64 begin, i64 end) { merge_rows(call, begin, end); };
  const i64 threads = threads_for(rows, bytes);
  threads > 1 ? for_parts(rows, threads, run) : run(0, rows);
}

}  // namespace jitkern
