// merge_state and merge_states on the host: launch of the kernel.
#include <algorithm>
#include <limits>

#include "host/pinned.h"
#include "merge_host.h"

namespace jitkern {

namespace {

constexpr i64 kMostRows = (1ll << 31) - 1;  // of one launch
// Up to so many threads in all the blocks are small: of 128 threads rather than of 512 one token of
// 32 heads takes 1.22 us and not 1.50, 64 tokens 1.73 and not 1.92, and 1,024 tokens 7.7 and not
// 7.5; 256 tokens the same.
constexpr i64 kSmallThreadsOfSm = 1024;

// A partial's rows as the GPU has them.
const char* address_on_gpu(const HeadRows& rows) {
  if (rows.on_cuda()) return rows.data;
  const Rows whole = rows.whole();
  return mapped_rows(whole) + (rows.data - whole.data);
}

// Elements of the widest vectors that all rows allow, of as many on both sides.
i64 elems_of_vector(const MergeCall& call) {
  const auto bits = [](const HeadRows& rows) {
    return address(rows.data) |
           static_cast<u64>(rows.row_bytes | rows.token_stride_bytes | rows.head_stride_bytes);
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

// The least number of partials that a kernel is made for and that holds as many.
int capacity_of(i64 num_states) {
  int capacity = 2;
  while (capacity < num_states) capacity *= 2;
  return capacity;
}

KernelTable& kernels() {
  // Of a kernel `splits` are the rows of a small block, and `in_flight` says how many of these a
  // large one is.
  static KernelTable table(
      "merge", {"dim", "vec_elems", "in_type", "out_type", "lse_type", "capacity", "plain"},
      [](const Spec&, int times, int rows) { return GroupShape{1, 1, times, rows}; });
  return table;
}

// By how many bytes rows follow each other, of all tokens and heads; -1 where some are apart
// otherwise.
i64 row_stride(const HeadRows& rows) {
  if (rows.heads == 1) return rows.token_stride_bytes;
  const bool is_one =
      rows.tokens == 1 || rows.token_stride_bytes == rows.heads * rows.head_stride_bytes;
  return is_one ? rows.head_stride_bytes : -1;
}

// Whether all partials count, and lie in one way in which rows follow each other.
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
  to.out_token_stride = call.out->token_stride_bytes;
  to.out_head_stride = call.out->head_stride_bytes;
  if (call.lse) {
    to.lse = call.lse->data;
    to.lse_token_stride = call.lse->token_stride_bytes;
    to.lse_head_stride = call.lse->head_stride_bytes;
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

// What a launch is told; a kernel takes the first of the partials, as many as it is made for.
struct Launches {
  const MergeCall& call;
  MergeParams<kMostStates> params;

  Launches(const MergeCall& call, bool plain) : call(call) {
    params.to = target_of(call);
    for (size_t i = 0; i < call.outs.size(); ++i) {
      const HeadRows& out = call.outs[i];
      const HeadRows& lse = call.lses[i];
      params.states[i] = {address_on_gpu(out),   address_on_gpu(lse),    out.token_stride_bytes,
                          out.head_stride_bytes, lse.token_stride_bytes, lse.head_stride_bytes};
    }
    if (!plain || call.out->heads > 1) return;
    // The kernel takes the stride of heads for that of rows, of the first partial for that of all.
    params.to.out_head_stride = params.to.out_token_stride;
    params.to.lse_head_stride = params.to.lse_token_stride;
    params.states[0].out_head_stride = params.states[0].out_token_stride;
    params.states[0].lse_head_stride = params.states[0].lse_token_stride;
  }

  // The next tokens, of which `done` are behind.
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
    to.out += tokens * to.out_token_stride;
    if (to.lse != nullptr) to.lse += tokens * to.lse_token_stride;
    if (to.valid_per_token) {
      to.num_valid = static_cast<const char*>(to.num_valid) + tokens * to.num_valid_bytes;
    }
    for (size_t i = 0; i < call.outs.size(); ++i) {
      params.states[i].out += tokens * params.states[i].out_token_stride;
      params.states[i].lse += tokens * params.states[i].lse_token_stride;
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
