#include "pairs_host.h"

#include <algorithm>
#include <limits>
#include <string>

#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"

namespace jitkern {

namespace {

GroupShape pair_shape(const Spec& spec, int in_flight, int splits) {
  return group_shape(window_bytes(spec[0], spec[1], spec[3] != 0), spec[1], in_flight, splits);
}

}  // namespace

std::optional<i64> num_sms_arg(const char* op, AnyView value) {
  if (is_none(value)) return std::nullopt;
  const i64 num_sms = int_arg(op, "num_sms", value);
  if (num_sms < 1) raise_value_error(op, "num_sms", std::to_string(num_sms), "at least 1");
  return num_sms;
}

void require_host_memory(const Rows& host, const Rows& device, const char* order) {
  if (!host.on_cuda()) return;
  const bool are_swapped = !device.on_cuda();
  host.value_error("device " + host.device_name(),
                   are_swapped ? std::string("cpu, in the order ") + order : "cpu");
}

PairArgs::PairArgs(const char* op, HostSide host_side, AnyView src_arg, AnyView dst_arg,
                   AnyView pairs_arg, AnyView num_sms_value)
    : src(op, "src", src_arg), dst(op, "dst", dst_arg), pairs(op, "pairs", pairs_arg) {
  this->host_side = host_side;
  num_sms = num_sms_arg(op, num_sms_value);
  const Rows& host = host_rows();
  require_host_memory(host, device_rows(), "(src, dst, pairs)");
  src.same_dtype(dst);
  // Pairs on the host may be those of a GPU's rows.
  if (pairs.on_cuda() || !device_rows().on_cuda()) pairs.same_device(device_rows());
  if (pairs.dl->ndim < 1 || pairs.dl->shape[pairs.dl->ndim - 1] != 2) {
    pairs.value_error("shape " + pairs.shape_text(),
                      "shape [..., 2] of (source row, destination row)");
  }
  src.same_row_bytes(dst);
  dst.distinct_rows();
  dst.apart_from(src);
  pairs.apart_from(dst);
  params.dst = dst.data;
  params.src = src.data;
  params.dst_stride_bytes = dst.stride_bytes;
  params.src_stride_bytes = src.stride_bytes;
  params.pairs = pairs.data;
  params.num_pairs = pairs.count / 2;
  params.num_src_rows = src.num_rows;
  params.num_dst_rows = dst.num_rows;
  row_bytes = src.row_bytes;
  index_bytes = pairs.index_bytes;
  device = device_rows().dl->device;
  span_bytes = host.num_rows * host.stride_bytes;
}

void PairArgs::take_slot_map(AnyView value) {
  if (is_none(value)) return;
  slot_map.emplace(src.op, "slot_map", value);
  slot_map->same_device(device_rows());
  if (slot_map->dl->ndim != 1 || slot_map->count != src.num_rows) {
    slot_map->value_error(
        "shape " + slot_map->shape_text(),
        "shape [" + std::to_string(src.num_rows) + "], one entry for each row of src");
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
      if (pair.is_padding() || pair.is_inside(params)) continue;
      if (pair.src_row >= src.num_rows) {
        raise_index_error(src.op, "pairs[..., 0]", i, pair.src_row, src.num_rows);
      }
      raise_index_error(src.op, "pairs[..., 1]", i, pair.dst_row, dst.num_rows);
    }
  });
}

void PairArgs::run_on_cpu() const {
  if (empty()) return;
  check_pairs();
  const PairCopyParams& p = params;
  pairs.with_index([&](const auto index_at) {
    copy_rows<kRandomBoth>(p.num_pairs, src.row_bytes, p.num_dst_rows * src.row_bytes,
                           [&p, index_at](i64 i) {
                             const Pair pair(index_at, i);
                             if (!pair.is_inside(p)) return CpuRow{nullptr, nullptr};
                             return CpuRow{p.dst + pair.dst_row * p.dst_stride_bytes,
                                           p.src + pair.src_row * p.src_stride_bytes};
                           });
  });
  update_slot_map();
}

void PairArgs::update_slot_map() const {
  const PairCopyParams& p = params;
  if (p.slot_map == nullptr) return;
  pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < p.num_pairs; ++i) {
      const Pair pair(index_at, i);
      if (!pair.is_inside(p)) continue;
      if (p.slot_map_bytes == 4) {
        static_cast<int32_t*>(p.slot_map)[pair.src_row] = static_cast<int32_t>(pair.dst_row);
      } else {
        static_cast<int64_t*>(p.slot_map)[pair.src_row] = pair.dst_row;
      }
    }
  });
}

void PairArgs::map_host_rows() {
  if (host_rows().empty()) return;
  char* const mapped = mapped_rows(host_rows());
  if (host_side == kHostSource) {
    params.src = mapped;
  } else {
    params.dst = mapped;
  }
}

KernelTable pair_kernels(const char* op) {
  return KernelTable(op, {"row_bytes", "vec_bytes", "index_bytes", "line_aligned", "large"},
                     pair_shape);
}

bool is_small_call(const PairCall& call) {
  return !call.num_sms && call.bytes() <= figure(call.ordinal(), kSmallCallBytes);
}

bool is_line_aligned(u64 host_bits, i64 row_bytes) {
  const bool inside =
      kHostLineBytes % row_bytes == 0 && host_bits % static_cast<u64>(row_bytes) == 0;
  return inside || host_bits % kHostLineBytes == 0;
}

Spec pair_spec(const PairCall& call, bool large, u64 more_bits) {
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

void launch_pair_copy(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                      const PairCopyParams& params, i64 bytes_in_flight) {
  const i64 wanted = std::min(num_sms_for(kernels, bytes_in_flight), call.max_sms);
  const i64 blocks =
      num_copy_blocks(scope, kernels, params.num_pairs, call.num_sms.value_or(wanted));
  scope.launch(kernels.entries[0], blocks, params);
}

}  // namespace jitkern
