// What ops on pairs share: checks, the CPU implementation, launches, the choice of a method.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>

#include "host/cpu_copy.h"
#include "host/tuning.h"
#include "host/workers.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

GroupShape pair_shape(const Spec& spec, int in_flight, int splits) {
  return group_shape(window_bytes(spec[0], spec[1], spec[3] != 0), spec[1], in_flight, splits);
}

}  // namespace

PairArgs::PairArgs(const char* op, const PairSites& sites, HostSide host_side, AnyView src_arg,
                   AnyView dst_arg, AnyView pairs_arg, AnyView num_sms_value)
    : src(op, "src", src_arg), dst(op, "dst", dst_arg), pairs(op, "pairs", pairs_arg) {
  this->host_side = host_side;
  num_sms = num_sms_arg(op, num_sms_value);
  const Rows& host = host_rows();
  require_host_memory(host, device_rows(), "(src, dst, pairs)");
  src.same_dtype(dst);
  // With rows on a GPU, pairs may be on the CPU too.
  if (pairs.on_cuda() || !device_rows().on_cuda()) pairs.same_device(device_rows());
  require_last_dim(pairs, 2, "source row, destination row");
  src.same_row_bytes(dst);
  dst.distinct_rows();
  dst.apart_from(src);
  pairs.apart_from(dst);
  set_target(dst.data, dst.stride_bytes, dst.num_rows);
  set_source(src.data, src.stride_bytes, src.num_rows);
  params.pairs = pairs.data;
  params.num_pairs = pairs.count / 2;
  params.src_site = sites.src;
  params.dst_site = sites.dst;
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
    const i64 dst_bytes = p.num_dst_rows * row_bytes;
    copy_rows<kRandomBoth>(end - begin, row_bytes, dst_bytes, [&p, index_at](i64 i) {
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

// -- the choice of a method ----------------------------------------------------------------------

namespace {

// Whether SMs are bound by page translations, not by bytes, even in the order of host memory.
bool is_bound_by_pages(const HostTraffic& traffic) {
  constexpr double kPageBytes = 64 << 10;
  constexpr double kMargin = 1.1;
  const double num_rows = double(traffic.num_rows);
  const double num_pages = double(traffic.span_bytes) / kPageBytes;
  // The expected number of pages that random rows touch.
  const double touched = num_pages * -std::expm1(-num_rows / num_pages);
  const double miss_bytes = double(figure(traffic.ordinal, kPageMissBytes));
  return touched * miss_bytes > kMargin * num_rows * double(traffic.row_bytes);
}

// Waking threads and sending the last chunk takes 0.1 to 0.2 ms. From 64 GiB, 8,192 rows reach 26
// GB/s by the CPU and 17 by SMs, 2,048 rows 12 and 30. Both at once pay from 16,384 rows on.
constexpr i64 kMinRowsByCpu = 8192;
constexpr i64 kMinRowsBothWays = 16384;

// The fastest method if pairs are on the CPU. The device's context must be current.
Method fastest_method(const PairArgs& args, i64 num_threads) {
  if (args.lists.reuse_resident || args.host_side == kHostTarget) return Method::kSms;
  if (!args.host_rows().empty() && !is_mapped(args.host_rows())) return Method::kCpu;
  const HostTraffic traffic = args.traffic();
  if (args.empty() || traffic.num_rows < kMinRowsByCpu ||
      num_threads < figure(traffic.ordinal, kBothThreads) || !is_bound_by_pages(traffic)) {
    return Method::kSms;
  }
  return traffic.num_rows < kMinRowsBothWays ? Method::kCpu : Method::kBoth;
}

// As many as torch, but one core is left to the driver and the rest of the process: with "both",
// 16 of 16 cores reach 38.8 GB/s from 64 GiB, 15 reach 46.2.
i64 default_threads() { return std::max<i64>(1, std::min(torch_num_threads(), num_cores() - 1)); }

// Copies the pairs to the GPU and launches the call there.
void upload_and_launch(const LaunchScope& scope, const PairArgs& args, i64 num_threads) {
  PairCall call = args;
  call.index_bytes = narrow_index_bytes(args);
  find_pair_kernels(scope, call);
  const i64 num_pairs = args.params.num_pairs;
  const auto copy = [&](const PairList& list, i64 begin, i64 count) {
    std::atomic<bool> any_outside{false};
    const auto copy_part = [&](i64 from, i64 to) {
      if (copy_pairs(args, list, begin, begin + from, begin + to)) any_outside = true;
    };
    for_parts(count, std::min(num_threads, threads_for(count, 16 * count)), copy_part);
    if (any_outside && count == num_pairs) args.check_pairs();
  };
  // If there are several blocks, all are checked before the first is queued. Pairs that another
  // thread puts out of range later are skipped.
  if (PairList::bytes(num_pairs, call.index_bytes) > Uploads::kBytes / 2) args.check_pairs();
  const auto list = upload(
      scope, num_pairs, PairList::bytes(1, call.index_bytes),
      [&](char* block, i64 begin, i64 count) { copy({block, call.index_bytes}, begin, count); });
  call.params.pairs = list.data_ptr();
  launch_pairs(scope, call);
}

}  // namespace

void PairArgs::take_method(AnyView method_arg, AnyView threads_arg) {
  const char* op = src.op;
  method = static_cast<Method>(
      host_side == kHostSource ? choice_arg(op, "method", method_arg, {"auto", "sm", "cpu", "both"})
                               : choice_arg(op, "method", method_arg, {"auto", "sm"}));
  if (!is_none(threads_arg)) {
    const i64 cores = num_cores();
    num_threads = int_arg(op, "num_threads", threads_arg);
    if (num_threads < 1 || num_threads > cores) {
      raise_value_error(op, "num_threads", std::to_string(num_threads),
                        str("1 to ", cores, ", the cores of this process"));
    }
  }
  if (method != Method::kCpu && method != Method::kBoth) return;
  const std::string actual = method == Method::kCpu ? "\"cpu\"" : "\"both\"";
  if (pairs.on_cuda()) {
    raise_value_error(op, "method", actual + " with pairs on " + pairs.device_name(),
                      "pairs on the CPU, whose cores read them, or \"sm\"");
  }
  if (lists.reuse_resident) {
    raise_value_error(op, "method", actual + " with reuse_resident",
                      "\"sm\": the slot map is on the GPU");
  }
}

void run_pairs(const LaunchScope& scope, PairArgs& args) {
  const bool pairs_on_cpu = !args.pairs.on_cuda();
  i64 num_threads = args.num_threads;
  if (pairs_on_cpu && num_threads == 0) num_threads = default_threads();
  Method method = args.method;
  if (method == Method::kAuto) {
    args.max_sms = kMaxSmsBeside;
    method = pairs_on_cpu ? fastest_method(args, num_threads) : Method::kSms;
  }
  args.params.fault = scope.device.fault_device;
  if (method != Method::kCpu) args.map_host_rows();
  if (args.empty()) return;
  if (!pairs_on_cpu) return launch_pairs(scope, args);

  require_no_capture(
      scope, args.pairs,
      "device " + args.device_rows().device_name() + ": a replay would not read them again");
  const RelaxedCapture relaxed;
  if (method == Method::kSms) {
    return upload_and_launch(scope, args, num_threads);
  }
  gather_by_cpu(scope, args, method == Method::kBoth, num_threads);
}

}  // namespace jitkern
