// A call of merge_state or merge_states: its arguments, checked.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "common.h"
#include "merge.h"

namespace jitkern {

// The kernel has 32 bits for row numbers.
constexpr i64 kMostRows = (1ll << 31) - 1;
// The most partials of a call. On a GPU more than kMostStates are merged in groups, in fp32, and
// then the groups' results, of which there are kMostStates at most.
constexpr i64 kMostPartials = kMostStates * kMostStates;

// Grids are [tokens, heads], whatever the layout of the lse.
struct MergeCall {
  const char* op;
  bool heads_first = false;
  tvm::ffi::Any scale_arg, prefill_arg;
  std::vector<Grid> partials, lses;
  std::optional<Grid> out, lse;
  std::optional<Tensor> scale;
  i64 tokens_of_first = std::numeric_limits<i64>::max();
  i64 dim = 0;
  int in_type = kFloat32, out_type = kFloat32;
  float log2_of_base = 1.44269504f, base_log_of_2 = 0.69314718f;
  bool lse_is_in_place = false;

  // `options` is None or (base, lse_layout, scale, prefill_tokens_with_context).
  MergeCall(const char* op, AnyView options);

  // Checks and appends a partial, or all partials of two lists.
  void add(const Tensor& out, const Tensor& lse);
  void add_all(AnyView partials, AnyView lses);
  // Checks the results, and the options that depend on them.
  void finish(AnyView out, AnyView lse);

  i64 num_states() const { return static_cast<i64>(partials.size()); }
  i64 num_rows() const { return out->outer * out->inner; }

 private:
  void take_scale();
  void take_prefill();
};

}  // namespace jitkern
