// merge_state and merge_states on the host: the ops, the CPU implementation, the launch. Arguments
// are checked in merge_args.cc.
#pragma GCC optimize("O3")  // vectorises the sums

#include <algorithm>
#include <cmath>

#include "merge_host.h"

namespace jitkern {

namespace {

// -- on the CPU ----------------------------------------------------------------------------------

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// The weight of each partial of a row, their sum, and the merged lse, as in merge.cu, but for any
// number of partials at once.
struct Shares {
  float of[kMostPartials];
  float sum = 0;
  float lse = -kInfinity;

  Shares(const MergeCall& call, i64 token, i64 head) {
    const auto load_lse = [&](i64 i) {
      return *reinterpret_cast<const float*>(call.lses[i].row(token, head));
    };
    if (token >= call.tokens_of_first) {  // copy the second partial
      of[0] = 0;
      of[1] = sum = 1;
      lse = load_lse(1);
      return;
    }
    float largest = -kInfinity;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = log_of(load_lse(i));
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

void merge_by_cpu(const MergeCall& call) {
  const float scale = call.scale ? *reinterpret_cast<const float*>(call.scale->data()) : 1;
  std::vector<float> values(static_cast<size_t>(call.dim));  // the sum of a row
  for (i64 row = 0; row < call.num_rows(); ++row) {
    const i64 token = row / call.out->inner, head = row % call.out->inner;
    const Shares shares(call, token, head);
    std::fill(values.begin(), values.end(), shares.sum == 0 ? 0.0f : -0.0f);
    for (i64 i = 0; i < call.num_states(); ++i) {
      if (shares.of[i] == 0) continue;
      kAdd[call.in_type](call.partials[i].row(token, head), shares.of[i], values.data(), call.dim);
    }
    kStore[call.out_type](call.out->row(token, head), values.data(), 1 / scale, call.dim);
    if (call.lse) *reinterpret_cast<float*>(call.lse->row(token, head)) = shares.lse;
  }
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
  for (const Grid& rows : call.partials) in |= bits(rows);
  const int in_item = item_bytes_of(call.in_type), out_item = item_bytes_of(call.out_type);
  const int out_vec = widest_vec(bits(*call.out));
  i64 elems = widest_vec(in) / in_item;
  while (elems > 1 && std::min<i64>(16, elems * out_item) > out_vec) elems /= 2;
  if (elems == 0 || out_vec < out_item) {
    (elems == 0 ? call.partials[0] : *call.out)
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
  if (call.tokens_of_first < call.out->outer) return false;
  if (call.num_states() < 2 && capacity == 2) return false;  // that kernel always reads both
  const i64 partials_stride = row_stride(call.partials[0]);
  const i64 lses_stride = row_stride(call.lses[0]);
  const i64 lse_stride = call.lse ? row_stride(*call.lse) : 0;
  if (partials_stride < 0 || lses_stride < 0 || lse_stride < 0 || row_stride(*call.out) < 0) {
    return false;
  }
  for (size_t i = 1; i < call.partials.size(); ++i) {
    if (row_stride(call.partials[i]) != partials_stride ||
        row_stride(call.lses[i]) != lses_stride) {
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
    to.lse_is_in_place = call.lse_is_in_place;
  }
  if (call.scale) to.scale = reinterpret_cast<const float*>(call.scale->data());
  to.num_states = static_cast<i32>(call.num_states());
  to.log2_of_base = call.log2_of_base;
  to.base_log_of_2 = call.base_log_of_2;
  to.heads = Divisor::of(static_cast<u32>(call.out->inner));
  to.num_rows = static_cast<u32>(call.num_rows());
  to.tokens_of_first = static_cast<u32>(std::min(call.tokens_of_first, kMostRows));
  for (size_t i = 0; i < call.partials.size(); ++i) {
    const Grid& out = call.partials[i];
    const Grid& lse = call.lses[i];
    params.states[i] = {out.on_gpu(), lse.on_gpu(), strides(out), strides(lse)};
  }
  return params;
}

// Queues one kernel, of at most `capacity` partials: 2, 4 or 8.
void launch_merge(const LaunchScope& scope, const MergeCall& call, int capacity) {
  // A small block has `rows` rows, a large one `times` as many.
  static KernelTable table(
      "merge", {"dim", "vec_elems", "in_type", "out_type", "capacity", "plain"},
      [](const Spec&, int times, int rows) { return GroupShape{1, 1, times, rows}; });
  const bool plain = is_plain(call, capacity);
  const LoadedKernels& loaded = table.find(
      scope.device,
      Spec(call.dim, elems_of_vector(call), call.in_type, call.out_type, capacity, plain));
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
  const std::vector<Grid> partials = std::move(call.partials), lses = std::move(call.lses);
  const i64 num_states = static_cast<i64>(partials.size());
  const i64 num_groups = ceil_div(num_states, kMostStates);
  const i64 tokens = call.out->outer, heads = call.out->inner;
  const DLDataType fp32{kDLFloat, 32, 1};
  const DLDevice device = call.out->dl->device;
  const auto group_outs = allocate({num_groups, tokens, heads, call.dim}, fp32, device);
  const auto group_lses = allocate({num_groups, tokens, heads}, fp32, device);
  const Grid first_out(Tensor(call.op, "scratch", group_outs), 1, 2, 3);
  const Grid first_lse(Tensor(call.op, "scratch", group_lses), 1, 2, 3);

  call.partials.clear();
  call.lses.clear();
  MergeCall group = call;
  group.out_type = kFloat32;
  group.scale.reset();
  group.lse_is_in_place = false;
  for (i64 g = 0; g < num_groups; ++g) {
    const i64 begin = g * kMostStates, end = std::min(begin + kMostStates, num_states);
    group.partials.assign(partials.begin() + begin, partials.begin() + end);
    group.lses.assign(lses.begin() + begin, lses.begin() + end);
    group.out = first_out.moved_by(g * call.num_rows() * first_out.row_bytes);
    group.lse = first_lse.moved_by(g * call.num_rows() * first_lse.row_bytes);
    launch_merge(scope, group, kMostStates);
    call.partials.push_back(*group.out);
    call.lses.push_back(*group.lse);
  }
  call.in_type = kFloat32;
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

void merge_state(AnyView partial_a, AnyView lse_a, AnyView partial_b, AnyView lse_b, AnyView out,
                 AnyView lse, AnyView options) {
  MergeCall call("merge_state", options);
  call.partials.reserve(2);
  call.lses.reserve(2);
  call.add(Tensor(call.op, "partial_a", partial_a), Tensor(call.op, "lse_a", lse_a));
  call.add(Tensor(call.op, "partial_b", partial_b), Tensor(call.op, "lse_b", lse_b));
  call.finish(out, lse);
  merge(call);
}

void merge_states(AnyView partials, AnyView lses, AnyView out, AnyView lse, AnyView options) {
  MergeCall call("merge_states", options);
  call.add_all(partials, lses);
  call.finish(out, lse);
  merge(call);
}

JITKERN_EXPORT_OP(merge_state, merge_state);
JITKERN_EXPORT_OP(merge_states, merge_states);

}  // namespace

}  // namespace jitkern
