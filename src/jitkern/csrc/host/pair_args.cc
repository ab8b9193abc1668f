#include <jitkern/cpu_copy.h>
#include <jitkern/pair_args.h>

#include <algorithm>
#include <limits>
#include <string>

namespace jitkern {

namespace {

// What to have on its way by default. Rows of 656 bytes have 128 KiB in flight per SM: 2 SMs
// saturate an idle bus, but beside a GEMM, where lines take longer to come, they move 33 GB/s and 3
// SMs 47.
constexpr i64 kBytesInFlight = 320 << 10;
constexpr i64 kMaxDefaultSms = 8;  // where vectors are narrow, the bus is out of reach
constexpr int kSmallCallThreads = 256;

i64 num_sms_arg(const char* op, AnyView value) {
  if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) return kMaxDefaultSms;
  const i64 num_sms = int_arg(op, "num_sms", value);
  if (num_sms < 1) raise_value_error(op, "num_sms", std::to_string(num_sms), "at least 1");
  return num_sms;
}

template <class Index>
void check_pairs(const char* op, const PairCopyParams& p) {
  const auto* pairs = static_cast<const Index*>(p.pairs);
  const char* note = "; nothing was written";
  for (i64 i = 0; i < p.num_pairs; ++i) {
    const i64 src_row = pairs[2 * i];
    const i64 dst_row = pairs[2 * i + 1];
    if (src_row < 0 || dst_row < 0) continue;
    if (src_row >= p.num_src_rows) {
      raise_index_error(op, "pairs[..., 0]", i, src_row, p.num_src_rows, note);
    }
    if (dst_row >= p.num_dst_rows) {
      raise_index_error(op, "pairs[..., 1]", i, dst_row, p.num_dst_rows, note);
    }
  }
}

template <class Index>
void copy_pairs(const PairCopyParams& p, i64 row_bytes) {
  const auto* pairs = static_cast<const Index*>(p.pairs);
  const auto skipped = [&](i64 i) { return pairs[2 * i] < 0 || pairs[2 * i + 1] < 0; };
  copy_rows<kRandomBoth>(p.num_pairs, row_bytes, p.num_dst_rows * row_bytes, [&](i64 i) {
    if (skipped(i)) return CpuRow{nullptr, nullptr};
    return CpuRow{p.dst + pairs[2 * i + 1] * p.dst_stride_bytes,
                  p.src + pairs[2 * i] * p.src_stride_bytes};
  });
  if (p.slot_map == nullptr) return;
  for (i64 i = 0; i < p.num_pairs; ++i) {
    if (skipped(i)) continue;
    if (p.slot_map_bytes == 4) {
      static_cast<int32_t*>(p.slot_map)[pairs[2 * i]] = static_cast<int32_t>(pairs[2 * i + 1]);
    } else {
      static_cast<int64_t*>(p.slot_map)[pairs[2 * i]] = pairs[2 * i + 1];
    }
  }
}

}  // namespace

PairArgs::PairArgs(const char* op, HostSide host_side, AnyView src_arg, AnyView dst_arg,
                   AnyView pairs_arg, AnyView num_sms_value)
    : host_side(host_side),
      src(op, "src", src_arg),
      dst(op, "dst", dst_arg),
      pairs_tensor(op, "pairs", pairs_arg),
      pairs(pairs_tensor),
      src_rows(src),
      dst_rows(dst),
      row_bytes(src_rows.row_bytes),
      sms_given(num_sms_value.type_index() != tvm::ffi::TypeIndex::kTVMFFINone),
      num_sms(num_sms_arg(op, num_sms_value)),
      params{} {
  if (host().on_cuda()) host().value_error("device " + host().device_name(), "cpu");
  src.same_dtype(dst);
  pairs_tensor.same_device(device());
  const DLTensor& dl = *pairs_tensor.dl;
  if (dl.ndim < 1 || dl.shape[dl.ndim - 1] != 2) {
    pairs_tensor.value_error("shape " + pairs_tensor.shape_text(),
                             "shape [..., 2] of (source row, destination row)");
  }
  same_row_bytes(src, src_rows, dst, dst_rows);
  params.dst = dst_rows.data;
  params.src = src_rows.data;
  params.dst_stride_bytes = dst_rows.stride_bytes;
  params.src_stride_bytes = src_rows.stride_bytes;
  params.pairs = pairs.data;
  params.num_pairs = pairs.count / 2;
  params.num_src_rows = src_rows.num_rows;
  params.num_dst_rows = dst_rows.num_rows;
  const bool gather = host_side == kHostSource;
  params.src_site = gather ? FaultSite::kH2dGatherSrc : FaultSite::kD2hScatterSrc;
  params.dst_site = gather ? FaultSite::kH2dGatherDst : FaultSite::kD2hScatterDst;
}

void PairArgs::take_slot_map(AnyView value) {
  if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) return;
  const Tensor tensor(src.op, "slot_map", value);
  tensor.same_device(device());
  const Indices slot_map(tensor);
  if (tensor.dl->ndim != 1 || slot_map.count != src_rows.num_rows) {
    tensor.value_error(
        "shape " + tensor.shape_text(),
        "shape [" + std::to_string(src_rows.num_rows) + "], one entry for each row of src");
  }
  if (slot_map.index_bytes == 4 && dst_rows.num_rows > std::numeric_limits<i32>::max()) {
    tensor.type_error("dtype int32", "int64 for a dst of 2^31 or more rows");
  }
  params.slot_map = const_cast<void*>(slot_map.data);
  params.slot_map_bytes = slot_map.index_bytes;
}

void PairArgs::check_pairs_on_cpu() const {
  pairs.index_bytes == 4 ? check_pairs<int32_t>(src.op, params)
                         : check_pairs<int64_t>(src.op, params);
}

void PairArgs::run_on_cpu() const {
  if (empty()) return;
  check_pairs_on_cpu();
  pairs.index_bytes == 4 ? copy_pairs<int32_t>(params, row_bytes)
                         : copy_pairs<int64_t>(params, row_bytes);
}

void PairArgs::map_host_rows() {
  const Rows& rows = host_side == kHostSource ? src_rows : dst_rows;
  if (rows.span_bytes() == 0) return;
  const PinnedRange range = pinned_range(rows.data);
  if (range.device_address == nullptr ||
      rows.data + rows.span_bytes() > range.begin + range.bytes) {
    host().value_error("pageable host memory",
                       "pinned host memory for a copy with a GPU; allocate it with "
                       "torch.empty(..., pin_memory=True) or call .pin_memory()");
  }
  if (host_side == kHostSource) {
    params.src = range.device_address;
  } else {
    params.dst = const_cast<char*>(range.device_address);
  }
}

PairLayout::PairLayout(const PairArgs& args) {
  const PairCopyParams& p = args.params;
  vec_bytes = vec_bytes_for(args.row_bytes, address(p.src), address(p.dst), p.src_stride_bytes,
                            p.dst_stride_bytes);
  const u64 host_bits = args.host_side == kHostSource ? address(p.src) | u64(p.src_stride_bytes)
                                                      : address(p.dst) | u64(p.dst_stride_bytes);
  line_aligned = host_bits % kHostLineBytes == 0;
}

void launch_pair_copy(const LaunchScope& scope, const PairArgs& args, const PairLayout& layout,
                      const Kernel& kernel, int in_flight) {
  const GroupShape shape =
      pair_copy_shape(args.row_bytes, layout.vec_bytes, layout.line_aligned, in_flight);
  const i64 threads = shape.num_threads(args.params.num_pairs);
  if (in_flight == kSmallInFlight) {
    scope.launch(kernel, ceil_div(threads, kSmallCallThreads), 1, kSmallCallThreads, args.params);
    return;
  }
  i64 blocks = args.num_sms;
  if (!args.sms_given) {
    const i64 block_bytes = i64(kernel.num_threads) * shape.rows * shape.chunks * layout.vec_bytes;
    blocks = std::min(blocks, ceil_div(kBytesInFlight, block_bytes));
  }
  blocks = std::min({blocks, i64(scope.device.num_sms), ceil_div(threads, kernel.num_threads)});
  scope.launch(kernel, blocks, 1, kernel.num_threads, args.params);
}

}  // namespace jitkern
