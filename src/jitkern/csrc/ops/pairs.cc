// Shared by the ops on pairs: checks, the CPU implementation, uploads, launches.
#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <limits>
#include <string>

#include "host/cpu_copy.h"
#include "host/link.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

GroupShape pair_shape(const Spec& spec, int in_flight, int splits) {
  return group_shape(window_bytes(spec[0], spec[1], spec[3] != 0), spec[1], in_flight, splits);
}

// `pairs` as a tensor of the right shape: transposed ones would be called not contiguous.
Tensor pairs_arg(const char* op, AnyView pairs) {
  const auto* list = pairs.as<tvm::ffi::ArrayObj>();
  if (list != nullptr && list->size() == 2 && list->at(0).try_cast<DLTensor*>().has_value()) {
    raise_type_error(op, "pairs", pairs, "a tensor, such as torch.stack((src, dst), 1)");
  }
  const Tensor tensor(op, "pairs", pairs);
  require_last_dim(tensor, 2, "source row, destination row");
  return tensor;
}

}  // namespace

PairArgs::PairArgs(const char* op, const PairSites& sites, HostSide host_side, AnyView src_arg,
                   AnyView dst_arg, AnyView pairs_value, AnyView num_sms_value)
    : host_side(host_side),
      src(op, "src", src_arg),
      dst(op, "dst", dst_arg),
      pairs(pairs_arg(op, pairs_value)),
      row_bytes(src.row_bytes),
      span_bytes(host_rows().num_rows * host_rows().stride_bytes),
      index_bytes(pairs.index_bytes),
      num_sms(num_sms_arg(op, num_sms_value)) {
  require_host_memory(host_rows(), device_rows(), "(src, dst, pairs)");
  src.same_dtype(dst);
  // If rows are on a GPU, pairs may be on the CPU too.
  if (pairs.on_cuda() || !device_rows().on_cuda()) pairs.same_device(device_rows());
  src.same_row_bytes(dst);
  dst.distinct_rows();
  dst.apart_from(src);
  pairs.apart_from(dst);
  params.dst = dst.data;
  params.dst_stride_bytes = dst.stride_bytes;
  params.num_dst_rows = dst.num_rows;
  params.src = src.data;
  params.src_stride_bytes = src.stride_bytes;
  params.num_src_rows = src.num_rows;
  params.pairs = pairs.data;
  params.num_pairs = pairs.count / 2;
  // Kernels number groups of 32 lanes with 32 bits, up to 2 per pair.
  if (params.num_pairs > std::numeric_limits<i32>::max()) {
    pairs.value_error(str(params.num_pairs, " pairs"), "less than 2^31");
  }
  params.src_site = sites.src;
  params.dst_site = sites.dst;
}

void PairArgs::take_slot_map(AnyView value) {
  if (is_none(value)) return;
  const Tensor tensor(src.op, "slot_map", value);
  tensor.contiguous();
  slot_map.emplace(tensor);
  slot_map->same_device(device_rows());
  if (slot_map->dl->ndim != 1 || slot_map->count != src.num_rows) {
    slot_map->shape_error(str("shape [", src.num_rows, "], one entry for each row of src"));
  }
  if (slot_map->index_bytes == 4 && dst.num_rows > std::numeric_limits<i32>::max()) {
    slot_map->type_error("dtype int32", "int64 for a dst of 2^31 or more rows");
  }
  slot_map->apart_from(dst);
  slot_map->apart_from(src);
  pairs.apart_from(Rows(*slot_map));
  params.slot_map = const_cast<void*>(slot_map->data);
  params.slot_map_bytes = slot_map->index_bytes;
}

void PairArgs::check_pairs() const {
  pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < params.num_pairs; ++i) {
      const Pair pair(index_at, i);
      if (pair.is_inside(params) || pair.is_padding()) continue;
      pair.require_inside(src.op, i, src.num_rows, dst.num_rows);
    }
  });
}

void PairArgs::run_on_cpu() const {
  if (empty()) return;
  check_pairs();
  copy_on_cpu(0, params.num_pairs);
  update_slot_map();
}

void PairArgs::copy_on_cpu(i64 begin, i64 end) const {
  const PairCopyParams& p = params;
  Indices part = pairs;
  part.data = static_cast<const char*>(pairs.data) + PairList::bytes(begin, index_bytes);
  part.with_index([&](const auto index_at) {
    copy_rows(end - begin, row_bytes, [&p, index_at](i64 i) {
      const Pair pair(index_at, i);
      if (!pair.is_inside(p)) return CpuRow{nullptr, nullptr};
      return CpuRow{p.dst + pair.dst_row * p.dst_stride_bytes,
                    p.src + pair.src_row * p.src_stride_bytes};
    });
  });
}

void PairArgs::update_slot_map() const {
  if (params.slot_map == nullptr) return;
  const PairList slots{params.slot_map, params.slot_map_bytes};
  pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < params.num_pairs; ++i) {
      const Pair pair(index_at, i);
      if (pair.is_inside(params)) slots.set_item(pair.src_row, pair.dst_row);
    }
  });
}

void PairArgs::map_host_rows() {
  params.src = address_on_gpu(src);
  params.dst = address_on_gpu(dst);
}

KernelTable pair_kernels(const char* op) {
  return KernelTable(op, {"row_bytes", "vec_bytes", "index_bytes", "line_aligned", "large"},
                     pair_shape);
}

bool is_small_call(const PairArgs& call) {
  constexpr i64 kSmallCallBytes = i64(2) << 20;  // the link's bytes in 40 us
  const int ordinal = call.device_rows().ordinal();
  return !call.num_sms && call.bytes() <= scaled_to_link(ordinal, kSmallCallBytes);
}

bool is_line_aligned(u64 host_bits, i64 row_bytes) {
  const bool inside =
      kHostLineBytes % row_bytes == 0 && host_bits % static_cast<u64>(row_bytes) == 0;
  return inside || host_bits % kHostLineBytes == 0;
}

Spec pair_spec(const PairArgs& call, bool large, u64 more_bits) {
  const PairCopyParams& p = call.params;
  const u64 src_bits = address(p.src) | static_cast<u64>(p.src_stride_bytes);
  const u64 dst_bits = address(p.dst) | static_cast<u64>(p.dst_stride_bytes);
  const u64 host_bits = call.host_side == kHostSource ? src_bits : dst_bits;
  const int vec_bytes =
      widest_vec(src_bits | dst_bits | more_bits | static_cast<u64>(call.row_bytes));
  return Spec(call.row_bytes, vec_bytes, call.index_bytes,
              is_line_aligned(host_bits, call.row_bytes), large);
}

i64 num_copy_blocks(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                    i64 num_sms) {
  const Kernel& kernel = kernels.entries[0];
  const i64 blocks = ceil_div(kernels.shape.num_threads(num_rows), kernel.num_threads);
  if (const bool large = kernels.spec[4] != 0; !large) return blocks;
  return std::min({blocks, num_sms, i64(scope.device.num_sms)});
}

i64 num_sms_for(const LoadedKernels& kernels, i64 bytes_in_flight) {
  const GroupShape& shape = kernels.shape;
  const i64 vec_bytes = kernels.spec[1];
  const i64 threads = kernels.entries[0].num_threads;
  const i64 block_bytes = threads * shape.rows * shape.chunks * vec_bytes;
  return std::min(ceil_div(bytes_in_flight, block_bytes), kMaxSms);
}

void launch_pair_copy(const LaunchScope& scope, const PairArgs& call, const LoadedKernels& kernels,
                      const PairCopyParams& params, i64 bytes_in_flight) {
  const i64 wanted = std::min(num_sms_for(kernels, bytes_in_flight), call.max_sms);
  const i64 blocks =
      num_copy_blocks(scope, kernels, params.num_pairs, call.num_sms.value_or(wanted));
  scope.launch(kernels.entries[0], blocks, params);
}

// -- on a GPU ------------------------------------------------------------------------------------

namespace {

// The bytes of the narrowest index that holds the call's row numbers.
int narrow_index_bytes(const PairArgs& args) {
  const i64 most = std::max(args.src.num_rows, args.dst.num_rows);
  return most <= std::numeric_limits<i32>::max() ? 4 : 8;
}

// Writes pairs [begin, begin + count) of the call to `list`; pairs out of range become padding.
// Returns whether there are any.
bool write_pairs(const PairArgs& args, i64 begin, i64 count, const PairList& list) {
  bool any_outside = false;
  args.pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < count; ++i) {
      const Pair pair(index_at, begin + i);
      const bool inside = pair.is_inside(args.params);
      if (!inside && !pair.is_padding()) any_outside = true;
      list.set(i, inside ? pair.src_row : -1, inside ? pair.dst_row : -1);
    }
  });
  return any_outside;
}

// Copies pairs on the CPU to the GPU and launches the call.
void upload_and_launch(const LaunchScope& scope, const PairArgs& args) {
  PairArgs call = args;
  call.index_bytes = narrow_index_bytes(args);
  find_pair_kernels(scope, call);  // may compile, which upload() must not
  const i64 num_pairs = args.params.num_pairs;
  const i64 pair_bytes = PairList::bytes(1, call.index_bytes);
  // Several blocks: all pairs are checked before the first block is queued. A pair that another
  // thread puts out of range later is skipped.
  const bool in_blocks = num_pairs * pair_bytes > Uploads::kBytes / 2;
  if (in_blocks) args.check_pairs();
  const auto list = upload(scope, num_pairs, pair_bytes, [&](char* block, i64 begin, i64 count) {
    const bool any_outside = write_pairs(args, begin, count, {block, call.index_bytes});
    if (any_outside && !in_blocks) args.check_pairs();
  });
  call.params.pairs = list.data_ptr();
  launch_pairs(scope, call);
}

}  // namespace

void PairArgs::take_method(AnyView method) {
  const bool is_auto = choice_arg(src.op, "method", method, {"auto", "sm"}) == 0;
  max_sms = is_auto ? kMaxSmsBeside : kMaxSms;
}

void run_pairs(const LaunchScope& scope, PairArgs& args) {
  args.params.fault = scope.device.fault_device;
  args.map_host_rows();
  if (args.empty()) return;
  if (args.pairs.on_cuda()) return launch_pairs(scope, args);
  require_no_capture(
      scope, args.pairs,
      "device " + args.device_rows().device_name() + ": a replay would not read them again");
  upload_and_launch(scope, args);
}

}  // namespace jitkern
