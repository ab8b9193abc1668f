// merge_state and merge_states on the host: checks, the CPU implementation, the launch.
#include "merge.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "host/cpu_copy.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;

// The kernel has 32 bits for offsets in a row, and for row numbers.
constexpr i64 kMostDim = (1ll << 28) - 1;
constexpr i64 kMostRows = (1ll << 31) - 1;
// The most partials of a call. On a GPU more than kMostStates are merged in groups, in fp32, and
// then the groups' results, of which there are kMostStates at most.
constexpr i64 kMostPartials = kMostStates * kMostStates;
constexpr const char* kLayouts[] = {"tokens_heads", "heads_tokens"};
constexpr const char* kPlace = "memory of its own, or exactly that of a partial, to merge in place";

// -- checks --------------------------------------------------------------------------------------

Grid value_rows(const Tensor& tensor, int first_dim = 0) {
  const DLTensor& dl = *tensor.dl;
  if (dl.ndim != first_dim + 3) {
    tensor.shape_error(first_dim ? "[n, tokens, heads, dim]" : "[tokens, heads, dim]");
  }
  const i64 dim = dl.shape[first_dim + 2];
  if (dim == 0 || dim > kMostDim) {
    tensor.value_error(str("dim ", dim), str("1 to ", kMostDim));
  }
  return Grid(tensor, first_dim, first_dim + 1, first_dim + 2);
}

// The rows of an lse, whose numbers of tokens and heads are those of `like`.
Grid lse_rows(const Tensor& lse, const Grid& like, bool heads_first, int first_dim = 0) {
  const DLTensor& dl = *lse.dl;
  const i64 tokens_and_heads[] = {like.outer, like.inner};
  if (dl.ndim == first_dim + 2 && dl.shape[first_dim] == tokens_and_heads[heads_first] &&
      dl.shape[first_dim + 1] == tokens_and_heads[!heads_first]) {
    return Grid(lse, first_dim + heads_first, first_dim + !heads_first, dl.ndim);
  }
  const auto fitting = [&](bool is_heads_first) {
    std::vector<int64_t> shape(like.dl->shape, like.dl->shape + first_dim);
    shape.push_back(tokens_and_heads[is_heads_first]);
    shape.push_back(tokens_and_heads[!is_heads_first]);
    return shape_text(shape.data(), shape.size()) +
           (is_heads_first ? " of (heads, tokens)" : " of (tokens, heads)");
  };
  lse.shape_error(str(fitting(heads_first), ", as ", like.arg, " has shape ", like.shape_text(),
                      "; or with lse_layout=\"", kLayouts[!heads_first], "\" ",
                      fitting(!heads_first)));
}

Tensor stacked(const char* op, const char* arg, AnyView value) {
  if (!value.try_cast<DLTensor*>().has_value()) {
    raise_type_error(op, arg, value, "a list of tensors, or one stacked tensor");
  }
  return Tensor(op, arg, value);
}

void check_count(const char* op, const char* counted, i64 count) {
  if (count >= 1 && count <= kMostPartials) return;
  raise_value_error(op, "outs", str(counted, count),
                    str("1 to ", kMostPartials, " partial results"));
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

// A checked call. `options` is None or (is_base_2, heads_first, scale, last). Grids are [tokens,
// heads], whatever the layout of the lse.
struct MergeCall {
  const char* op;
  bool heads_first = false;
  Any scale_arg;
  Any last;  // prefill_tokens_with_context of merge_state, count of merge_states
  std::vector<Grid> outs, lses;
  std::optional<Grid> out, lse;
  std::optional<Tensor> scale;
  std::optional<Indices> num_valid;
  i64 first_state = 0;  // num_valid counts the partials of this call from this number on
  i64 tokens_of_first = std::numeric_limits<i64>::max();
  i64 dim = 0;
  int in_type = kFloat32, out_type = kFloat32;
  int lse_type = kFloat32;         // FloatType of `lses`
  int merged_lse_type = kFloat32;  // FloatType of `lse`
  float log2_of_base = 1.44269504f, base_log_of_2 = 0.69314718f;
  bool lse_is_in_place = false;

  MergeCall(const char* op, AnyView options) : op(op) {
    if (is_none(options)) return;
    const auto values = options.cast<Array<Any>>();
    if (values[0].cast<bool>()) log2_of_base = base_log_of_2 = 1;
    heads_first = values[1].cast<bool>();
    scale_arg = values[2];
    last = values[3];
  }

  i64 num_states() const { return static_cast<i64>(outs.size()); }
  i64 num_rows() const { return out->outer * out->inner; }

  // Checks and appends a partial.
  void add(const Tensor& out, const Tensor& lse) {
    in_type = float_type(out);
    lse_type = float_type(lse);
    if (!outs.empty()) {
      const Tensor& first = outs[0];
      out.same_dtype(first);
      if (out.dl->ndim != first.dl->ndim ||
          !std::equal(out.dl->shape, out.dl->shape + out.dl->ndim, first.dl->shape)) {
        out.shape_error(str("shape ", first.shape_text(), " as in ", first.arg));
      }
      lse.same_dtype(lses[0]);
    }
    outs.push_back(value_rows(out));
    lses.push_back(lse_rows(lse, outs[0], heads_first));
  }

  void add_stacked(const Tensor& out, const Tensor& lse) {
    in_type = float_type(out);
    lse_type = float_type(lse);
    const Grid first = value_rows(out, 1);
    const i64 count = out.dl->shape[0];
    check_count(op, "a first dimension of ", count);
    const Grid first_lse = lse_rows(lse, first, heads_first, 1);
    if (lse.dl->shape[0] != count) {
      lse.shape_error(str("a first dimension of ", count, " as in outs"));
    }
    for (i64 i = 0; i < count; ++i) {
      outs.push_back(first.moved_by(i * out.stride(0) * out.item_bytes()));
      lses.push_back(first_lse.moved_by(i * lse.stride(0) * lse.item_bytes()));
    }
  }

  // Lists of tensors, or one stacked tensor of each.
  void add_all(AnyView outs_arg, AnyView lses_arg) {
    const auto list = outs_arg.as<Array<Any>>();
    const auto lse_list = lses_arg.as<Array<Any>>();
    if (!list) {
      const Tensor out = stacked(op, "outs", outs_arg);
      if (lse_list) raise_type_error(op, "lses", lses_arg, "a stacked tensor, as outs is");
      return add_stacked(out, stacked(op, "lses", lses_arg));
    }
    if (!lse_list) raise_type_error(op, "lses", lses_arg, "a list of tensors, as outs is");
    const size_t count = list->size();
    check_count(op, "a list of ", static_cast<i64>(count));
    if (lse_list->size() != count) {
      raise_value_error(op, "lses", str("a list of ", lse_list->size()),
                        str(count, ", one for each of outs"));
    }
    static const auto& out_names = *new auto(item_names("outs", kMostPartials));
    static const auto& lse_names = *new auto(item_names("lses", kMostPartials));
    outs.reserve(count);
    lses.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      add(Tensor(op, out_names[i].c_str(), (*list)[i]),
          Tensor(op, lse_names[i].c_str(), (*lse_list)[i]));
    }
  }

  void finish(AnyView out_arg, AnyView lse_arg) {
    const Tensor tensor(op, "output", out_arg);
    out_type = float_type(tensor, true);
    out = value_rows(tensor);
    dim = tensor.dl->shape[2];
    const Grid& like = outs[0];
    const int64_t shape[] = {like.outer, like.inner, like.dl->shape[like.dl->ndim - 1]};
    if (!std::equal(shape, shape + 3, tensor.dl->shape)) {
      tensor.shape_error(str("shape ", shape_text(shape, 3), " as in ", like.arg));
    }
    // Partials of a result on a GPU may also be in pinned host memory.
    for (size_t i = 0; i < outs.size(); ++i) {
      for (const Grid* partial : {&outs[i], &lses[i]}) {
        if (partial->on_cuda() || !tensor.on_cuda()) partial->same_device(tensor);
      }
    }
    check_written(*out, outs, lses);
    if (!is_none(lse_arg)) {
      lse = lse_rows(Tensor(op, "lse", lse_arg), *out, heads_first);
      merged_lse_type = float_type(*lse);
      lse->same_device(tensor);
      lse->apart_from(*out);
      lse_is_in_place = check_written(*lse, lses, outs);
    }
    take_scale();
  }

  // Required for float8_e4m3fn, refused for other types.
  void take_scale() {
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

  // Checks the number of partials that count: one for all tokens, or one for each.
  void take_count() {
    num_valid.emplace(op, "count", last);
    num_valid->same_device(*out);
    if (num_valid->dl->ndim > 1 || (num_valid->count != 1 && num_valid->count != out->outer)) {
      num_valid->shape_error(str("shape [1] or [", out->outer, "], one for each token"));
    }
    num_valid->apart_from(out->whole());
    if (lse) num_valid->apart_from(lse->whole());
  }
};

// -- on the CPU ----------------------------------------------------------------------------------

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Values of a row that are summed in a buffer: few enough for L1, enough for vectorised loops.
constexpr i64 kPartDim = 512;

template <int kIn>
float load(const char* from) {
  return float_of<kIn>(*reinterpret_cast<const Bits<kIn>*>(from));
}

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
constexpr float (*kLoad[])(const char*) = {load<kFloat32>, load<kFloat16>, load<kBFloat16>};
constexpr void (*kAdd[])(const char*, float, float*, i64) = {add<kFloat32>, add<kFloat16>,
                                                             add<kBFloat16>};
constexpr void (*kStore[])(char*, const float*, float, i64) = {
    store<kFloat32>, store<kFloat16>, store<kBFloat16>, store<kFloat8E4M3>};

// The weight of each partial of a row, their sum, and the merged lse, as in merge.cu, but for any
// number of partials at once.
struct Shares {
  float of[kMostPartials];
  float sum = 0;
  float lse = -kInfinity;

  Shares(const MergeCall& call, i64 token, i64 head, i64 num_valid) {
    const auto load_lse = kLoad[call.lse_type];
    if (token >= call.tokens_of_first) {  // copy the second partial
      of[0] = 0;
      of[1] = sum = 1;
      lse = load_lse(call.lses[1].row(token, head));
      return;
    }
    float largest = -kInfinity;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = -kInfinity;
      if (i < num_valid) of[i] = log_of(load_lse(call.lses[i].row(token, head)));
      largest = std::fmax(largest, of[i]);
    }
    const float center = largest == -kInfinity ? 0 : largest;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = std::exp2((of[i] - center) * call.log2_of_base);
      sum += of[i];
    }
    const float factor = sum == 0 ? 0 : 1 / sum;
    for (i64 i = 0; i < call.num_states(); ++i) of[i] *= factor;
    // A single partial keeps its lse, even the sign of a zero.
    lse = sum == 1 ? largest : center + std::log2(sum) * call.base_log_of_2;
  }
};

void merge_row(const MergeCall& call, const Shares& shares, float scale, i64 token, i64 head) {
  const auto add_part = kAdd[call.in_type];
  const auto store_part = kStore[call.out_type];
  char* const to = call.out->row(token, head);
  float values[kPartDim];
  for (i64 begin = 0; begin < call.dim; begin += kPartDim) {
    const i64 count = std::min(kPartDim, call.dim - begin);
    std::fill_n(values, count, shares.sum == 0 ? 0.0f : -0.0f);
    for (i64 i = 0; i < call.num_states(); ++i) {
      if (shares.of[i] == 0) continue;
      const char* const from = call.outs[i].row(token, head);
      add_part(from + begin * item_bytes_of(call.in_type), shares.of[i], values, count);
    }
    store_part(to + begin * item_bytes_of(call.out_type), values, 1 / scale, count);
  }
}

void merge_rows(const MergeCall& call, i64 begin, i64 end) {
  const float scale = call.scale ? *reinterpret_cast<const float*>(call.scale->data()) : 1;
  for (i64 row = begin; row < end; ++row) {
    const i64 token = row / call.out->inner, head = row % call.out->inner;
    i64 num_valid = call.num_states();
    if (call.num_valid) {
      call.num_valid->with_index([&](const auto at) {
        num_valid = std::min(num_valid, at(call.num_valid->count > 1 ? token : 0));
      });
    }
    const Shares shares(call, token, head, num_valid);
    merge_row(call, shares, scale, token, head);
    if (call.lse) kStore[call.merged_lse_type](call.lse->row(token, head), &shares.lse, 1, 1);
  }
}

void merge_by_cpu(const MergeCall& call) {
  const i64 rows = call.num_rows();
  const i64 bytes = rows * (call.num_states() * call.outs[0].row_bytes + call.out->row_bytes);
  for_parts(rows, threads_for(rows, bytes),
            [&call](i64 begin, i64 end) { merge_rows(call, begin, end); });
}

// -- on a GPU ------------------------------------------------------------------------------------

// Calls of at most this many threads per SM use blocks of 128 threads, not 512: one token of 32
// heads takes 1.22 us instead of 1.50, 64 tokens 1.73 instead of 1.92, but 1,024 tokens 7.7, not
// 7.5.
constexpr i64 kSmallThreadsOfSm = 1024;

// The elements of the widest vector to which all rows are aligned, of partials and result alike.
i64 elems_of_vector(const MergeCall& call) {
  const auto bits = [](const Grid& rows) {
    return address(rows.data) | static_cast<u64>(rows.row_bytes) | rows.stride_bits();
  };
  u64 in = 0;
  for (const Grid& rows : call.outs) in |= bits(rows);
  const int in_item = item_bytes_of(call.in_type), out_item = item_bytes_of(call.out_type);
  const int out_vec = widest_vec(bits(*call.out));
  i64 elems = widest_vec(in) / in_item;
  while (elems > 1 && std::min<i64>(16, elems * out_item) > out_vec) elems /= 2;
  if (elems == 0 || out_vec < out_item) {
    (elems == 0 ? call.outs[0] : *call.out)
        .value_error("memory that is not aligned to its elements", "aligned memory");
  }
  return elems;
}

// The distance of neighbouring rows; -1 if it is not the same for all.
i64 row_stride(const Grid& rows) {
  const bool is_even = rows.outer == 1 || rows.outer_stride == rows.inner * rows.inner_stride;
  return rows.inner == 1 ? rows.outer_stride : is_even ? rows.inner_stride : -1;
}

// Whether a plain kernel can run the call: all partials are present, with equally spaced rows and
// the same layout.
bool is_plain(const MergeCall& call, int capacity) {
  if (call.num_valid || call.tokens_of_first < call.out->outer) return false;
  if (call.num_states() < 2 && capacity == 2) return false;  // that kernel always reads both
  const i64 outs_stride = row_stride(call.outs[0]);
  const i64 lses_stride = row_stride(call.lses[0]);
  const i64 lse_stride = call.lse ? row_stride(*call.lse) : 0;
  if (outs_stride < 0 || lses_stride < 0 || lse_stride < 0 || row_stride(*call.out) < 0) {
    return false;
  }
  for (size_t i = 1; i < call.outs.size(); ++i) {
    if (row_stride(call.outs[i]) != outs_stride || row_stride(call.lses[i]) != lses_stride) {
      return false;
    }
  }
  return true;
}

// The parameters of a kernel of any capacity, which reads the first bytes of them.
MergeParams<kMostStates> params_of(const MergeCall& call, bool plain) {
  // A plain kernel reads the head stride as the stride of all rows.
  const auto strides = [&](const Grid& rows) {
    const bool by_token = plain && rows.inner == 1;
    return HeadStrides{rows.outer_stride, by_token ? rows.outer_stride : rows.inner_stride};
  };
  MergeParams<kMostStates> params;
  MergeTarget& to = params.to = {};
  to.out = call.out->data;
  to.out_strides = strides(*call.out);
  if (call.lse) {
    to.lse = call.lse->data;
    to.lse_strides = strides(*call.lse);
    to.lse_type = call.merged_lse_type;
    to.lse_is_in_place = call.lse_is_in_place;
  }
  if (call.scale) to.scale = reinterpret_cast<const float*>(call.scale->data());
  if (call.num_valid) {
    to.num_valid = call.num_valid->data;
    to.num_valid_bytes = call.num_valid->index_bytes;
    to.valid_per_token = call.num_valid->count > 1;
    to.first_state = static_cast<short>(call.first_state);
  }
  to.num_states = static_cast<i32>(call.num_states());
  to.log2_of_base = call.log2_of_base;
  to.base_log_of_2 = call.base_log_of_2;
  to.heads = Divisor::of(static_cast<u32>(call.out->inner));
  to.num_rows = static_cast<u32>(call.num_rows());
  to.tokens_of_first = static_cast<u32>(std::min(call.tokens_of_first, kMostRows));
  for (size_t i = 0; i < call.outs.size(); ++i) {
    const Grid& out = call.outs[i];
    const Grid& lse = call.lses[i];
    params.states[i] = {out.on_gpu(), lse.on_gpu(), strides(out), strides(lse)};
  }
  return params;
}

// Queues one kernel, of at most `capacity` partials: 2, 4 or 8.
void launch_merge(const LaunchScope& scope, const MergeCall& call, int capacity) {
  // A small block has `rows` rows, a large one `times` as many.
  static KernelTable table(
      "merge", {"dim", "vec_elems", "in_type", "out_type", "lse_type", "capacity", "plain"},
      [](const Spec&, int times, int rows) { return GroupShape{1, 1, times, rows}; });
  const bool plain = is_plain(call, capacity);
  const LoadedKernels& loaded =
      table.find(scope.device, Spec(call.dim, elems_of_vector(call), call.in_type, call.out_type,
                                    call.lse_type, capacity, plain));
  MergeParams<kMostStates> params = params_of(call, plain);
  const Kernel& kernel = loaded.entries[0];
  const unsigned small = kernel.num_threads / loaded.shape.splits;
  const i64 small_blocks = ceil_div(params.to.num_rows, loaded.shape.rows);
  const bool is_small = small_blocks * small <= scope.device.num_sms * kSmallThreadsOfSm;
  const int times = is_small ? 1 : loaded.shape.splits;
  params.to.rows_of_block = static_cast<u32>(times * loaded.shape.rows);
  const u64 bytes = sizeof(MergeTarget) + static_cast<u64>(capacity) * sizeof(PartialState);
  scope.launch_bytes(kernel, ceil_div(small_blocks, times), &params, static_cast<i64>(bytes),
                     times * small);
}

// Merges each group of kMostStates partials into fp32 scratch memory, then the groups' results. All
// launches are of kernels of one capacity, so that two kernels serve any number of partials.
void merge_in_groups(const LaunchScope& scope, MergeCall call) {
  const std::vector<Grid> outs = std::move(call.outs), lses = std::move(call.lses);
  const i64 num_states = static_cast<i64>(outs.size());
  const i64 num_groups = ceil_div(num_states, kMostStates);
  const i64 tokens = call.out->outer, heads = call.out->inner;
  const DLDataType fp32{kDLFloat, 32, 1};
  const DLDevice device = call.out->dl->device;
  const auto group_outs = allocate({num_groups, tokens, heads, call.dim}, fp32, device);
  const auto group_lses = allocate({num_groups, tokens, heads}, fp32, device);
  const Grid first_out(Tensor(call.op, "scratch", group_outs), 1, 2, 3);
  const Grid first_lse(Tensor(call.op, "scratch", group_lses), 1, 2, 3);

  call.outs.clear();
  call.lses.clear();
  MergeCall group = call;
  group.out_type = group.merged_lse_type = kFloat32;
  group.scale.reset();
  group.lse_is_in_place = false;
  for (i64 g = 0; g < num_groups; ++g) {
    const i64 begin = g * kMostStates, end = std::min(begin + kMostStates, num_states);
    group.first_state = begin;
    group.outs.assign(outs.begin() + begin, outs.begin() + end);
    group.lses.assign(lses.begin() + begin, lses.begin() + end);
    group.out = first_out.moved_by(g * call.num_rows() * first_out.row_bytes);
    group.lse = first_lse.moved_by(g * call.num_rows() * first_lse.row_bytes);
    launch_merge(scope, group, kMostStates);
    call.outs.push_back(*group.out);
    call.lses.push_back(*group.lse);
  }
  call.in_type = call.lse_type = kFloat32;
  call.num_valid.reset();
  call.lse_is_in_place = false;
  launch_merge(scope, call, kMostStates);
}

void merge_by_gpu(const MergeCall& call) {
  const LaunchScope scope(*call.out);
  if (call.out->empty()) return;
  if (call.num_rows() > kMostRows) {
    call.out->value_error(str(call.num_rows(), " rows"), "less than 2^31");
  }
  const i64 num_states = call.num_states();
  if (num_states > kMostStates) return merge_in_groups(scope, call);
  launch_merge(scope, call, num_states <= 2 ? 2 : num_states <= 4 ? 4 : 8);
}

void merge(const MergeCall& call) { call.out->on_cuda() ? merge_by_gpu(call) : merge_by_cpu(call); }

void merge_state(AnyView out_a, AnyView lse_a, AnyView out_b, AnyView lse_b, AnyView out,
                 AnyView lse, AnyView options) {
  MergeCall call("merge_state", options);
  call.outs.reserve(2);
  call.lses.reserve(2);
  call.add(Tensor(call.op, "out_a", out_a), Tensor(call.op, "lse_a", lse_a));
  call.add(Tensor(call.op, "out_b", out_b), Tensor(call.op, "lse_b", lse_b));
  call.finish(out, lse);
  if (!is_none(call.last)) {
    constexpr const char* kArg = "prefill_tokens_with_context";
    call.tokens_of_first = int_arg(call.op, kArg, call.last);
    if (call.tokens_of_first < 0) {
      raise_value_error(call.op, kArg, std::to_string(call.tokens_of_first), "0 or more");
    }
  }
  merge(call);
}

void merge_states(AnyView outs, AnyView lses, AnyView out, AnyView lse, AnyView options) {
  MergeCall call("merge_states", options);
  call.add_all(outs, lses);
  call.finish(out, lse);
  if (!is_none(call.last)) call.take_count();
  merge(call);
}

JITKERN_EXPORT_OP(merge_state, merge_state);
JITKERN_EXPORT_OP(merge_states, merge_states);

}  // namespace

}  // namespace jitkern
