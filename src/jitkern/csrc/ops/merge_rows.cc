// Tensors of merge_state and merge_states as rows of a token and a head.
#include <algorithm>

#include "merge_host.h"

namespace jitkern {

HeadRows::HeadRows(const Tensor& tensor, int token_dim, int head_dim, bool has_values)
    : Tensor(tensor),
      data(tensor.data()),
      tokens(dl->shape[token_dim]),
      heads(dl->shape[head_dim]),
      row_bytes(item_bytes()) {
  const auto stride_bytes = [&](int dim) {
    i64 items = 1;
    for (int d = dl->ndim - 1; d > dim; --d) items *= dl->shape[d];
    return (dl->strides == nullptr ? items : i64(dl->strides[dim])) * item_bytes();
  };
  if (has_values) {
    const int last = dl->ndim - 1;
    if (dl->shape[last] > 1 && stride_bytes(last) != item_bytes()) {
      value_error("stride " + std::to_string(dl->strides[last]) + " in dimension " +
                      std::to_string(last) + " of shape " + shape_text(),
                  "stride 1 there; call .contiguous()");
    }
    row_bytes *= dl->shape[last];
  }
  // Where there is one of them its stride says nothing, and no alignment is lost by it.
  token_stride_bytes = tokens > 1 ? stride_bytes(token_dim) : 0;
  head_stride_bytes = heads > 1 ? stride_bytes(head_dim) : 0;
  begin = end = address(data);
  if (tokens == 0 || heads == 0) return;
  for (const i64 reach : {(tokens - 1) * token_stride_bytes, (heads - 1) * head_stride_bytes}) {
    (reach < 0 ? begin : end) += static_cast<u64>(reach);
  }
  end += static_cast<u64>(row_bytes);
}

HeadRows HeadRows::behind(i64 bytes) const {
  HeadRows moved = *this;
  moved.data += bytes;
  moved.begin += static_cast<u64>(bytes);
  moved.end += static_cast<u64>(bytes);
  return moved;
}

bool HeadRows::is_same_place_as(const HeadRows& other) const {
  return data == other.data && row_bytes == other.row_bytes &&
         token_stride_bytes == other.token_stride_bytes &&
         head_stride_bytes == other.head_stride_bytes;
}

void HeadRows::distinct_rows() const {
  if (tokens == 0 || heads == 0) return;
  const i64 token_stride = std::abs(token_stride_bytes);
  const i64 head_stride = std::abs(head_stride_bytes);
  const i64 a_token = (heads - 1) * head_stride + row_bytes;
  const i64 a_head = (tokens - 1) * token_stride + row_bytes;
  const bool apart_by_token =
      (heads == 1 || head_stride >= row_bytes) && (tokens == 1 || token_stride >= a_token);
  const bool apart_by_head =
      (tokens == 1 || token_stride >= row_bytes) && (heads == 1 || head_stride >= a_head);
  if (apart_by_token || apart_by_head) return;
  value_error("strides by which rows of " + std::to_string(row_bytes) + " bytes share memory (" +
                  std::to_string(token_stride_bytes) + " bytes between tokens and " +
                  std::to_string(head_stride_bytes) + " between heads, shape " + shape_text() + ")",
              "rows apart in a tensor that is written; .clone() one that was expanded");
}

Rows HeadRows::whole() const {
  const i64 bytes = static_cast<i64>(end - begin);
  Rows one(*this, 1, bytes, bytes);
  one.data = reinterpret_cast<char*>(begin);
  one.begin = begin;
  one.end = end;
  return one;
}

Rows HeadRows::rows() const {
  const i64 token_stride = std::abs(token_stride_bytes);
  const i64 head_stride = std::abs(head_stride_bytes);
  Rows all = whole();
  const auto as = [&all](i64 count, i64 bytes, i64 stride) {
    all.num_rows = count;
    all.row_bytes = bytes;
    all.stride_bytes = count > 1 ? stride : bytes;
    return all;
  };
  if (tokens == 1) return as(heads, row_bytes, head_stride);
  if (heads == 1) return as(tokens, row_bytes, token_stride);
  if (token_stride == heads * head_stride) return as(tokens * heads, row_bytes, head_stride);
  if (head_stride == tokens * token_stride) return as(tokens * heads, row_bytes, token_stride);
  if (token_stride > head_stride) {
    return as(tokens, (heads - 1) * head_stride + row_bytes, token_stride);
  }
  return as(heads, (tokens - 1) * token_stride + row_bytes, head_stride);
}

}  // namespace jitkern
