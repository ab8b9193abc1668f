// merge_state and merge_states on the host: the CPU implementation, and the launch of the kernel.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "merge_host.h"

namespace jitkern {

namespace {

// -- on the CPU: row by row, by loops that the compiler vectorises
// ---------------------------------

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Values that are added up before they go to memory: they stay in L1, and the loops over them are
// long enough.
constexpr i64 kPartDim = 512;

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

  Shares(const MergeCall& call, i64 token, i64 head, i64 num_valid) {
    if (token >= call.tokens_of_first) {  // the second of two as it is
      of[0] = 0;
      of[1] = sum = 1;
      lse = load_lse(call.lses[1].row(token, head), call.lse_type);
      return;
    }
    float largest = -kInfinity;
    for (i64 i = 0; i < call.num_states(); ++i) {
      of[i] = -kInfinity;
      if (i < num_valid) of[i] = log_of(load_lse(call.lses[i].row(token, head), call.lse_type));
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
    const i64 token = row / call.out->heads, head = row % call.out->heads;
    i64 num_valid = call.num_states();
    if (call.num_valid) {
      call.num_valid->with_index([&](const auto at) {
        num_valid = std::min(num_valid, at(call.num_valid->count > 1 ? token : 0));
      });
    }
    const Shares shares(call, token, head, num_valid);
    merge_row(call, shares, scale, token, head);
    if (call.lse) store_lse(call.lse->row(token, head), call.merged_lse_type, shares.lse);
  }
}

void merge_by_cpu(const MergeCall& call) {
  const i64 rows = call.out->tokens * call.out->heads;
  const i64 bytes = rows * (call.num_states() * call.outs[0].row_bytes + call.out->row_bytes);
  const auto run = [&call](i64 begin, i64 end) { merge_rows(call, begin, end); };
  const i64 threads = threads_for(rows, bytes);
  threads > 1 ? for_parts(rows, threads, run) : run(0, rows);
}

// -- on a GPU ------------------------------------------------------------------------------------

constexpr i64 kMostRows = (1ll << 31) - 1;  // of one launch
// Up to so many threads in all, blocks have 128 threads rather than 512: one token of 32 heads
// takes 1.22 us and not 1.50, 64 tokens 1.73 and not 1.92, but 1,024 tokens 7.7 and not 7.5.
constexpr i64 kSmallThreadsOfSm = 1024;

// A partial's rows as the GPU has them.
const char* address_on_gpu(const HeadRows& rows) {
  if (rows.on_cuda()) return rows.data;
  const Rows whole = rows.whole();
  return mapped_rows(whole) + (rows.data - whole.data);
}

// Elements of the widest vectors that all rows allow, the same number on both sides.
i64 elems_of_vector(const MergeCall& call) {
  const auto bits = [](const HeadRows& rows) {
    return address(rows.data) |
           static_cast<u64>(rows.row_bytes | rows.strides.token | rows.strides.head);
  };
  u64 in = 0;
  for (const HeadRows& rows : call.outs) in |= bits(rows);
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

// The partials that a kernel is made for: a power of two.
int capacity_of(i64 num_states) {
  int capacity = 2;
  while (capacity < num_states) capacity *= 2;
  return capacity;
}

KernelTable& kernels() {
  // `rows` of a small block; a large block has `times` as many.
  static KernelTable table(
      "merge", {"dim", "vec_elems", "in_type", "out_type", "lse_type", "capacity", "plain"},
      [](const Spec&, int times, int rows) { return GroupShape{1, 1, times, rows}; });
  return table;
}

// The one stride of all rows, or -1.
i64 row_stride(const HeadRows& rows) {
  if (rows.heads == 1) return rows.strides.token;
  const bool is_one = rows.tokens == 1 || rows.strides.token == rows.heads * rows.strides.head;
  return is_one ? rows.strides.head : -1;
}

// Whether all partials count, with one stride for all rows of all of them.
bool is_plain(const MergeCall& call) {
  if (call.num_valid || call.tokens_of_first < call.out->tokens || call.outs.size() < 2)
    return false;
  const i64 of_outs = row_stride(call.outs[0]);
  const i64 of_lses = row_stride(call.lses[0]);
  const i64 of_lse = call.lse ? row_stride(*call.lse) : 0;
  if (of_outs < 0 || of_lses < 0 || of_lse < 0 || row_stride(*call.out) < 0) return false;
  for (size_t i = 1; i < call.outs.size(); ++i) {
    if (row_stride(call.outs[i]) != of_outs || row_stride(call.lses[i]) != of_lses) return false;
  }
  return true;
}

MergeTarget target_of(const MergeCall& call) {
  MergeTarget to{};
  to.out = call.out->data;
  to.out_strides = call.out->strides;
  if (call.lse) {
    to.lse = call.lse->data;
    to.lse_strides = call.lse->strides;
    to.lse_type = call.merged_lse_type;
    to.lse_is_in_place = call.lse_is_in_place;
  }
  if (call.scale) to.scale = reinterpret_cast<const float*>(call.scale->data());
  if (call.num_valid) {
    to.num_valid = call.num_valid->data;
    to.num_valid_bytes = call.num_valid->index_bytes;
    to.valid_per_token = call.num_valid->count > 1;
  }
  to.num_states = static_cast<i32>(call.num_states());
  to.log2_of_base = call.log2_of_base;
  to.base_log_of_2 = call.base_log_of_2;
  to.heads = Divisor::of(static_cast<u32>(call.out->heads));
  return to;
}

// A kernel takes the first of the partials, as many as it is made for.
struct Launches {
  const MergeCall& call;
  MergeParams<kMostStates> params;

  Launches(const MergeCall& call, bool plain) : call(call) {
    params.to = target_of(call);
    for (size_t i = 0; i < call.outs.size(); ++i) {
      const HeadRows& out = call.outs[i];
      const HeadRows& lse = call.lses[i];
      params.states[i] = {address_on_gpu(out), address_on_gpu(lse), out.strides, lse.strides};
    }
    if (!plain || call.out->heads > 1) return;
    // The kernel takes the head stride as the row stride, the first partial's for all.
    for (HeadStrides* strides : {&params.to.out_strides, &params.to.lse_strides,
                                 &params.states[0].out_strides, &params.states[0].lse_strides}) {
      strides->head = strides->token;
    }
  }

  // Launches the next tokens, after `done`.
  void launch(const LaunchScope& scope, const LoadedKernels& kernels, i64 done, i64 tokens) {
    MergeTarget& to = params.to;
    to.num_rows = static_cast<u32>(tokens * call.out->heads);
    to.tokens_of_first =
        static_cast<u32>(std::clamp<i64>(call.tokens_of_first - done, 0, kMostRows));
    const Kernel& kernel = kernels.entries[0];
    const unsigned small = kernel.num_threads / kernels.shape.splits;
    const i64 small_blocks = ceil_div(to.num_rows, kernels.shape.rows);
    const bool is_small = small_blocks * small <= scope.device.num_sms * kSmallThreadsOfSm;
    const int times = is_small ? 1 : kernels.shape.splits;
    to.rows_of_block = static_cast<u32>(times * kernels.shape.rows);
    const i64 bytes = static_cast<i64>(sizeof(MergeTarget) +
                                       static_cast<u64>(kernels.spec[5]) * sizeof(PartialState));
    scope.launch_bytes(kernel, ceil_div(small_blocks, times), &params, bytes, times * small);
    to.out += tokens * to.out_strides.token;
    if (to.lse != nullptr) to.lse += tokens * to.lse_strides.token;
    if (to.valid_per_token) {
      to.num_valid = static_cast<const char*>(to.num_valid) + tokens * to.num_valid_bytes;
    }
    for (size_t i = 0; i < call.outs.size(); ++i) {
      params.states[i].out += tokens * params.states[i].out_strides.token;
      params.states[i].lse += tokens * params.states[i].lse_strides.token;
    }
  }
};

void merge_by_gpu(const MergeCall& call) {
  const LaunchScope scope(*call.out);
  const i64 tokens = call.out->tokens, heads = call.out->heads;
  if (tokens == 0 || heads == 0) return;
  if (heads > kMostRows) call.out->value_error(std::to_string(heads) + " heads", "less than 2^31");
  const bool plain = is_plain(call);
  const LoadedKernels& loaded = kernels().find(
      scope.device, Spec(call.dim, elems_of_vector(call), call.in_type, call.out_type,
                         call.lse_type, capacity_of(call.num_states()), plain));
  Launches launches(call, plain);
  const i64 most_tokens = kMostRows / heads;
  for (i64 done = 0; done < tokens; done += most_tokens) {
    launches.launch(scope, loaded, done, std::min(most_tokens, tokens - done));
  }
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
  if (!is_none(call.options.last)) call.take_prefill_tokens(call.options.last);
  merge(call);
}

void merge_states(AnyView outs, AnyView lses, AnyView out, AnyView lse, AnyView options) {
  MergeCall call("merge_states", options);
  call.add_all(outs, lses);
  call.finish(out, lse);
  if (!is_none(call.options.last)) call.take_num_valid(call.options.last);
  merge(call);
}

JITKERN_EXPORT_OP(merge_state, merge_state);
JITKERN_EXPORT_OP(merge_states, merge_states);

}  // namespace

}  // namespace jitkern
