// Checks of a call of merge_state or merge_states, and its tensors as rows of a token and a head.
#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "merge_host.h"

namespace jitkern {

using tvm::ffi::Any;
using tvm::ffi::Array;

namespace {

// Offsets in a row are 32-bit in the kernel.
constexpr i64 kMostDim = (1ll << 28) - 1;
constexpr const char* kLayouts[] = {"tokens_heads", "heads_tokens"};
constexpr const char* kPlace = "memory of its own, or exactly that of a partial, to merge in place";

// One of FloatType; `with_fp8`: float8_e4m3fn too.
int float_type(const Tensor& tensor, bool with_fp8 = false) {
  const DLDataType& dtype = tensor.dl->dtype;
  const auto is = [&dtype](DLDataTypeCode code, int bits) {
    return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(kDLFloat, 32)) return kFloat32;
  if (is(kDLFloat, 16)) return kFloat16;
  if (is(kDLBfloat, 16)) return kBFloat16;
  if (with_fp8 && is(kDLFloat8_e4m3fn, 8)) return kFloat8E4M3;
  tensor.type_error(
      "dtype " + tensor.dtype_name(),
      with_fp8 ? "float32, float16, bfloat16 or float8_e4m3fn" : "float32, float16 or bfloat16");
}

// "outs[3]", for as long as the process lives.
const char* numbered(const char* name, i64 number) {
  using Names = std::array<std::string, kMostStates>;
  const auto make = [](const char* of) {
    Names names;
    for (size_t i = 0; i < names.size(); ++i)
      names[i] = std::string(of) + "[" + std::to_string(i) + "]";
    return names;
  };
  static const auto* const outs = new Names(make("outs"));
  static const auto* const lses = new Names(make("lses"));
  return (*name == 'o' ? *outs : *lses)[static_cast<size_t>(number)].c_str();
}

HeadRows value_rows(const Tensor& tensor, int first_dim = 0) {
  const DLTensor& dl = *tensor.dl;
  if (dl.ndim != first_dim + 3) {
    tensor.value_error("shape " + tensor.shape_text(),
                       first_dim ? "[n, tokens, heads, dim]" : "[tokens, heads, dim]");
  }
  const i64 dim = dl.shape[first_dim + 2];
  if (dim == 0 || dim > kMostDim) {
    tensor.value_error("dim " + std::to_string(dim), "1 to " + std::to_string(kMostDim));
  }
  return HeadRows(tensor, first_dim, first_dim + 1, true);
}

void require_same_shape(const Tensor& tensor, const Tensor& other) {
  if (tensor.dl->ndim == other.dl->ndim &&
      std::equal(tensor.dl->shape, tensor.dl->shape + tensor.dl->ndim, other.dl->shape)) {
    return;
  }
  tensor.value_error("shape " + tensor.shape_text(),
                     "shape " + other.shape_text() + " as in " + other.arg);
}

Tensor stacked(const char* op, const char* arg, AnyView value) {
  if (!value.try_cast<DLTensor*>().has_value()) {
    raise_type_error(op, arg, value, "a list of tensors, or one stacked tensor");
  }
  return Tensor(op, arg, value);
}

void check_count(const char* op, const char* arg, const char* what, i64 count) {
  if (count >= 1 && count <= kMostStates) return;
  raise_value_error(op, arg, what + std::to_string(count),
                    "1 to " + std::to_string(kMostStates) + " partial results");
}

void require_same_count(const Tensor& lse, i64 count) {
  lse.value_error("shape " + lse.shape_text(),
                  "a first dimension of " + std::to_string(count) + " as in outs");
}

// The rows of an lse, whose numbers of tokens and heads are those of `like`.
HeadRows lse_rows(const Tensor& lse, const HeadRows& like, bool heads_first, int first_dim = 0) {
  const DLTensor& dl = *lse.dl;
  const i64 tokens_and_heads[] = {like.tokens, like.heads};
  if (dl.ndim == first_dim + 2 && dl.shape[first_dim] == tokens_and_heads[heads_first] &&
      dl.shape[first_dim + 1] == tokens_and_heads[!heads_first]) {
    return HeadRows(lse, first_dim + heads_first, first_dim + !heads_first, false);
  }
  const auto fitting = [&](bool is_heads_first) {
    std::vector<int64_t> shape(like.dl->shape, like.dl->shape + first_dim);
    shape.push_back(tokens_and_heads[is_heads_first]);
    shape.push_back(tokens_and_heads[!is_heads_first]);
    return shape_text(shape.data(), shape.size()) +
           (is_heads_first ? " of (heads, tokens)" : " of (tokens, heads)");
  };
  lse.value_error("shape " + lse.shape_text(),
                  fitting(heads_first) + ", as " + like.arg + " has shape " + like.shape_text() +
                      "; or with lse_layout=\"" + kLayouts[!heads_first] + "\" " +
                      fitting(!heads_first));
}

i64 first_stride_bytes(const Tensor& tensor) {
  i64 items = 1;
  for (int d = 1; d < tensor.dl->ndim; ++d) items *= tensor.dl->shape[d];
  return (tensor.dl->strides == nullptr ? items : i64(tensor.dl->strides[0])) * tensor.item_bytes();
}

// Where a partial may be: with the result, or in pinned host memory for a GPU.
void check_place(const HeadRows& partial, const Tensor& out) {
  if (partial.on_cuda() || !out.on_cuda()) partial.same_device(out);
}

// Whether it is in place of a partial; ValueError where it shares memory with one in another way.
bool check_written(const HeadRows& written, const std::vector<HeadRows>& same,
                   const std::vector<HeadRows>& others) {
  written.distinct_rows();
  bool in_place = false;
  for (const HeadRows& one : same) {
    const bool is_same = written.is_same_place_as(one);
    in_place |= is_same;
    if (!is_same) written.apart_from(one, kPlace);
  }
  for (const HeadRows& one : others) written.apart_from(one, kOwnMemory);
  return in_place;
}

HeadRows out_rows(const Tensor& out, const HeadRows& like) {
  const HeadRows rows = value_rows(out);
  const i64 dim = like.dl->shape[like.dl->ndim - 1];
  if (rows.tokens != like.tokens || rows.heads != like.heads || out.dl->shape[2] != dim) {
    const int64_t shape[] = {like.tokens, like.heads, dim};
    out.value_error("shape " + out.shape_text(),
                    "shape " + shape_text(shape, 3) + " as in " + like.arg);
  }
  return rows;
}

Tensor scale_of(const Tensor& scale, const MergeCall& call) {
  const DLDataType& dtype = scale.dl->dtype;
  if (dtype.code != kDLFloat || dtype.bits != 32 || dtype.lanes != 1) {
    scale.type_error("dtype " + scale.dtype_name(), "float32");
  }
  if (scale.numel() != 1) scale.value_error("shape " + scale.shape_text(), "1 element");
  scale.same_device(*call.out);
  const Rows one(scale, 1, 4, 4);
  one.apart_from(call.out->rows());
  if (call.lse) one.apart_from(call.lse->rows());
  return scale;
}

Indices num_valid_of(const Indices& num_valid, const MergeCall& call) {
  num_valid.same_device(*call.out);
  if (num_valid.dl->ndim > 1 || (num_valid.count != 1 && num_valid.count != call.out->tokens)) {
    num_valid.value_error(
        "shape " + num_valid.shape_text(),
        "shape [1] or [" + std::to_string(call.out->tokens) + "], one for each token");
  }
  num_valid.apart_from(call.out->whole());
  if (call.lse) num_valid.apart_from(call.lse->whole());
  return num_valid;
}

}  // namespace

MergeCall::Options::Options(AnyView value) {
  if (is_none(value)) return;
  const auto given = value.cast<Array<Any>>();
  is_base_2 = given[0].cast<bool>();
  heads_first = given[1].cast<bool>();
  scale = given[2];
  last = given[3];
}

void MergeCall::add(const Tensor& out, const Tensor& lse) {
  in_type = float_type(out);
  lse_type = float_type(lse);
  if (!outs.empty()) {
    out.same_dtype(outs[0]);
    require_same_shape(out, outs[0]);
    lse.same_dtype(lses[0]);
  }
  outs.push_back(value_rows(out));
  lses.push_back(lse_rows(lse, outs[0], options.heads_first));
}

void MergeCall::add_stacked(const Tensor& out, const Tensor& lse) {
  in_type = float_type(out);
  lse_type = float_type(lse);
  const HeadRows first = value_rows(out, 1);
  const i64 count = out.dl->shape[0];
  check_count(op, "outs", "a first dimension of ", count);
  const HeadRows first_lse = lse_rows(lse, first, options.heads_first, 1);
  if (lse.dl->shape[0] != count) require_same_count(lse, count);
  for (i64 i = 0; i < count; ++i) {
    outs.push_back(first.moved_by(i * first_stride_bytes(out)));
    lses.push_back(first_lse.moved_by(i * first_stride_bytes(lse)));
  }
}

void MergeCall::add_all(AnyView outs_arg, AnyView lses_arg) {
  const auto list = outs_arg.as<Array<Any>>();
  const auto lse_list = lses_arg.as<Array<Any>>();
  if (!list) {
    const Tensor out = stacked(op, "outs", outs_arg);
    if (lse_list) raise_type_error(op, "lses", lses_arg, "a stacked tensor, as outs is");
    return add_stacked(out, stacked(op, "lses", lses_arg));
  }
  if (!lse_list) raise_type_error(op, "lses", lses_arg, "a list of tensors, as outs is");
  const i64 count = static_cast<i64>(list->size());
  check_count(op, "outs", "a list of ", count);
  if (static_cast<i64>(lse_list->size()) != count) {
    raise_value_error(op, "lses", "a list of " + std::to_string(lse_list->size()),
                      std::to_string(count) + ", one for each of outs");
  }
  outs.reserve(static_cast<size_t>(count));
  lses.reserve(static_cast<size_t>(count));
  for (i64 i = 0; i < count; ++i) {
    add(Tensor(op, numbered("outs", i), (*list)[i]),
        Tensor(op, numbered("lses", i), (*lse_list)[i]));
  }
}

void MergeCall::finish(AnyView out_arg, AnyView lse_arg) {
  log2_of_base = options.is_base_2 ? 1.0f : 1.44269504f;
  base_log_of_2 = options.is_base_2 ? 1.0f : 0.69314718f;
  const Tensor tensor(op, "output", out_arg);
  out_type = float_type(tensor, true);
  out = out_rows(tensor, outs[0]);
  dim = tensor.dl->shape[2];
  for (size_t i = 0; i < outs.size(); ++i) {
    check_place(outs[i], tensor);
    check_place(lses[i], tensor);
  }
  check_written(*out, outs, lses);
  if (!is_none(lse_arg)) {
    lse = lse_rows(Tensor(op, "lse", lse_arg), *out, options.heads_first);
    merged_lse_type = float_type(*lse);
    lse->same_device(tensor);
    lse->apart_from(*out, kOwnMemory);
    lse_is_in_place = check_written(*lse, lses, outs);
  }
  const bool is_fp8 = out_type == kFloat8E4M3;
  if (!is_none(options.scale)) {
    scale = scale_of(Tensor(op, "scale", options.scale), *this);
    if (!is_fp8) scale->value_error("a tensor", "None, as output is " + tensor.dtype_name());
  } else if (is_fp8) {
    raise_value_error(op, "scale", "None",
                      "a float32 tensor of 1 element, as output is float8_e4m3fn");
  }
}

void MergeCall::take_prefill_tokens(AnyView value) {
  constexpr const char* kArg = "prefill_tokens_with_context";
  tokens_of_first = int_arg(op, kArg, value);
  if (tokens_of_first < 0) {
    raise_value_error(op, kArg, std::to_string(tokens_of_first), "0 or more");
  }
}

void MergeCall::take_num_valid(AnyView value) {
  num_valid = num_valid_of(Indices(op, "count", value), *this);
}

// -- rows ----------------------------------------------------------------------------------------

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
  // The stride of a dimension of 1 says nothing, and must not cost alignment.
  strides = {tokens > 1 ? stride_bytes(token_dim) : 0, heads > 1 ? stride_bytes(head_dim) : 0};
  begin = end = address(data);
  if (tokens == 0 || heads == 0) return;
  for (const i64 reach : {(tokens - 1) * strides.token, (heads - 1) * strides.head}) {
    (reach < 0 ? begin : end) += static_cast<u64>(reach);
  }
  end += static_cast<u64>(row_bytes);
}

HeadRows HeadRows::moved_by(i64 bytes) const {
  HeadRows moved = *this;
  moved.data += bytes;
  moved.begin += static_cast<u64>(bytes);
  moved.end += static_cast<u64>(bytes);
  return moved;
}

bool HeadRows::is_same_place_as(const HeadRows& other) const {
  return data == other.data && row_bytes == other.row_bytes &&
         strides.token == other.strides.token && strides.head == other.strides.head;
}

void HeadRows::distinct_rows() const {
  if (tokens == 0 || heads == 0) return;
  const i64 token_stride = std::abs(strides.token);
  const i64 head_stride = std::abs(strides.head);
  const i64 a_token = (heads - 1) * head_stride + row_bytes;
  const i64 a_head = (tokens - 1) * token_stride + row_bytes;
  const bool apart_by_token =
      (heads == 1 || head_stride >= row_bytes) && (tokens == 1 || token_stride >= a_token);
  const bool apart_by_head =
      (tokens == 1 || token_stride >= row_bytes) && (heads == 1 || head_stride >= a_head);
  if (apart_by_token || apart_by_head) return;
  value_error("strides by which rows of " + std::to_string(row_bytes) + " bytes share memory (" +
                  std::to_string(strides.token) + " bytes between tokens and " +
                  std::to_string(strides.head) + " between heads, shape " + shape_text() + ")",
              "rows apart in a tensor that is written; .clone() one that was expanded");
}

Rows HeadRows::rows() const {
  const i64 token_stride = std::abs(strides.token);
  const i64 head_stride = std::abs(strides.head);
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
