// Arguments of merge_state and merge_states: reading and checking them.
#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <string>

#include "merge_host.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;

// The kernel has 32 bits for offsets in a row.
constexpr i64 kMostDim = (1ll << 28) - 1;
constexpr const char* kLayouts[] = {"tokens_heads", "heads_tokens"};
constexpr const char* kPlace = "memory of its own, or exactly that of a partial, to merge in place";

Grid value_rows(const Tensor& tensor) {
  if (tensor.dl->ndim != 3) tensor.shape_error("[tokens, heads, dim]");
  const i64 dim = tensor.dl->shape[2];
  if (dim == 0 || dim > kMostDim) tensor.value_error(str("dim ", dim), str("1 to ", kMostDim));
  return Grid(tensor, 0, 1, 2);
}

// The rows of an lse, whose numbers of tokens and heads are those of `like`.
Grid lse_rows(const Tensor& lse, const Grid& like, bool heads_first) {
  if (!lse.has_dtype(kDLFloat, 32)) lse.dtype_error("float32");
  const DLTensor& dl = *lse.dl;
  const i64 tokens_and_heads[] = {like.outer, like.inner};
  if (dl.ndim == 2 && dl.shape[0] == tokens_and_heads[heads_first] &&
      dl.shape[1] == tokens_and_heads[!heads_first]) {
    return Grid(lse, heads_first, !heads_first, 2);
  }
  const auto fitting = [&](bool is_heads_first) {
    const int64_t shape[] = {tokens_and_heads[is_heads_first], tokens_and_heads[!is_heads_first]};
    return shape_text(shape, 2) + (is_heads_first ? " of (heads, tokens)" : " of (tokens, heads)");
  };
  lse.shape_error(str(fitting(heads_first), ", as ", like.arg, " has shape ", like.shape_text(),
                      "; or with lse_layout=\"", kLayouts[!heads_first], "\" ",
                      fitting(!heads_first)));
}

// Whether `written` is in place of a partial of `same`. ValueError if it overlaps a partial in
// another way.
bool check_written(const Grid& written, const std::vector<Grid>& same,
                   const std::vector<Grid>& others) {
  written.distinct_rows();
  bool in_place = false;
  for (const Grid& partial : same) {
    const bool is_same = written.is_same_place_as(partial);
    in_place |= is_same;
    if (!is_same) written.apart_from(partial, kPlace);
  }
  for (const Grid& partial : others) written.apart_from(partial);
  return in_place;
}

}  // namespace

MergeCall::MergeCall(const char* op, AnyView options) : op(op) {
  if (is_none(options)) return;
  const auto values = options.cast<Array<Any>>();
  if (choice_arg(op, "base", values[0], {"e", "2"}) == 1) log2_of_base = base_log_of_2 = 1;
  heads_first = choice_arg(op, "lse_layout", values[1], {kLayouts[0], kLayouts[1]}) == 1;
  scale_arg = values[2];
  prefill_arg = values[3];
}

void MergeCall::add(const Tensor& out, const Tensor& lse) {
  in_type = float_type(out);
  if (!partials.empty()) {
    const Tensor& first = partials[0];
    out.same_dtype(first);
    if (out.dl->ndim != first.dl->ndim ||
        !std::equal(out.dl->shape, out.dl->shape + out.dl->ndim, first.dl->shape)) {
      out.shape_error(str("shape ", first.shape_text(), " as in ", first.arg));
    }
  }
  partials.push_back(value_rows(out));
  lses.push_back(lse_rows(lse, partials[0], heads_first));
}

void MergeCall::add_all(AnyView partials_arg, AnyView lses_arg) {
  const auto list = partials_arg.cast<Array<Any>>(), lse_list = lses_arg.cast<Array<Any>>();
  const auto count = static_cast<i64>(list.size());
  if (count < 1 || count > kMostPartials) {
    raise_value_error(op, "partials", str("a list of ", count),
                      str("1 to ", kMostPartials, " partial results"));
  }
  if (static_cast<i64>(lse_list.size()) != count) {
    raise_value_error(op, "lses", str("a list of ", lse_list.size()),
                      str(count, ", as many as partials"));
  }
  static const auto& partial_names = *new auto(item_names("partials", kMostPartials));
  static const auto& lse_names = *new auto(item_names("lses", kMostPartials));
  partials.reserve(list.size());
  lses.reserve(list.size());
  for (i64 i = 0; i < count; ++i) {
    add(Tensor(op, partial_names[i].c_str(), list[i]),
        Tensor(op, lse_names[i].c_str(), lse_list[i]));
  }
}

void MergeCall::finish(AnyView out_arg, AnyView lse_arg) {
  const Tensor tensor(op, "output", out_arg);
  out_type = float_type(tensor, true);
  out = value_rows(tensor);
  dim = tensor.dl->shape[2];
  const Grid& like = partials[0];
  if (!std::equal(like.dl->shape, like.dl->shape + 3, tensor.dl->shape)) {
    tensor.shape_error(str("shape ", like.shape_text(), " as in ", like.arg));
  }
  // Partials of a result on a GPU may also be in pinned host memory.
  for (size_t i = 0; i < partials.size(); ++i) {
    for (const Grid* partial : {&partials[i], &lses[i]}) {
      if (partial->on_cuda() || !tensor.on_cuda()) partial->same_device(tensor);
    }
  }
  check_written(*out, partials, lses);
  if (!is_none(lse_arg)) {
    if (!lse_arg.try_cast<DLTensor*>().has_value()) {
      raise_type_error(op, "lse", lse_arg, "a tensor, None or False");
    }
    lse = lse_rows(Tensor(op, "lse", lse_arg), *out, heads_first);
    lse->same_device(tensor);
    lse->apart_from(*out);
    lse_is_in_place = check_written(*lse, lses, partials);
  }
  take_scale();
  if (!is_none(prefill_arg)) take_prefill();
}

// The scale is required for float8_e4m3fn, and refused for other types.
void MergeCall::take_scale() {
  const bool is_fp8 = out_type == kFloat8E4M3;
  if (is_none(scale_arg)) {
    if (!is_fp8) return;
    raise_value_error(op, "scale", "None",
                      "a float32 tensor of 1 element, as output is float8_e4m3fn");
  }
  scale.emplace(op, "scale", scale_arg);
  if (!scale->has_dtype(kDLFloat, 32)) scale->dtype_error("float32");
  if (scale->numel() != 1) scale->shape_error("1 element");
  scale->same_device(*out);
  const Rows item(*scale, 1, 4, 4);
  item.apart_from(out->whole());
  if (lse) item.apart_from(lse->whole());
  if (!is_fp8) scale->value_error("a tensor", "None, as output is " + out->dtype_name());
}

void MergeCall::take_prefill() {
  constexpr const char* kArg = "prefill_tokens_with_context";
  tokens_of_first = int_arg(op, kArg, prefill_arg);
  if (tokens_of_first < 0) {
    raise_value_error(op, kArg, std::to_string(tokens_of_first), "0 or more");
  }
}

}  // namespace jitkern
