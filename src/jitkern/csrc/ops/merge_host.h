// A checked call of merge_state or merge_states.
#pragma once

#include <optional>
#include <vector>

#include "common.h"
#include "merge.h"

namespace jitkern {

constexpr i64 kMostTokens = ~0ull >> 1;

// A tensor as rows [token, head], each of neighbouring bytes, at any strides.
struct HeadRows : Tensor {
  char* data;
  i64 tokens;
  i64 heads;
  i64 row_bytes;
  HeadStrides strides;
  u64 begin;  // address of the lowest byte, unless it is empty
  u64 end;    // after the highest

  // ValueError unless rows are contiguous. With `has_values` the last dimension is a row's values;
  // else a row is one number.
  HeadRows(const Tensor& tensor, int token_dim, int head_dim, bool has_values);

  char* row(i64 token, i64 head) const { return data + strides.offset(token, head); }
  // The same `bytes` further on.
  HeadRows moved_by(i64 bytes) const;
  bool is_same_place_as(const HeadRows& other) const;
  // ValueError if two rows of a tensor that is written may share bytes.
  void distinct_rows() const;
  // ValueError if a row shares a byte with one of `other`.
  void apart_from(const HeadRows& other, const char* expected) const {
    if (begin < other.end && other.begin < end) rows().apart_from(other.rows(), expected);
  }
  Rows whole() const { return as_one_row(*this, begin, end); }
  // As equally spaced rows: exact if they are, else each token, or each head, is one.
  Rows rows() const;
};

struct MergeCall {
  // Of both ops: None, or (is_base_2, heads_first, scale, last).
  struct Options {
    bool is_base_2 = false;
    bool heads_first = false;
    tvm::ffi::Any scale;
    tvm::ffi::Any last;

    explicit Options(AnyView value);
  };

  const char* op;
  Options options;
  std::vector<HeadRows> outs;
  std::vector<HeadRows> lses;
  std::optional<HeadRows> out;
  std::optional<HeadRows> lse;
  std::optional<Tensor> scale;
  std::optional<Indices> num_valid;   // of merge_states
  i64 tokens_of_first = kMostTokens;  // of merge_state
  i64 dim = 0;
  int in_type = kFloat32;
  int out_type = kFloat32;
  int lse_type = kFloat32;  // of the partials'
  int merged_lse_type = kFloat32;
  float log2_of_base = 1;
  float base_log_of_2 = 1;
  bool lse_is_in_place = false;

  MergeCall(const char* op, AnyView options) : op(op), options(options) {}
  void add(const Tensor& out, const Tensor& lse);
  // Lists of tensors, or one stacked tensor of each.
  void add_all(AnyView outs, AnyView lses);
  void finish(AnyView out, AnyView lse);
  void take_prefill_tokens(AnyView value);
  void take_num_valid(AnyView value);

  i64 num_states() const { return static_cast<i64>(outs.size()); }

 private:
  void add_stacked(const Tensor& out, const Tensor& lse);
};

}  // namespace jitkern
