// h2d_gather on the host: checks, CPU implementation, launch.
#include "h2d_gather.h"

#include <jitkern/launch.h>
#include <jitkern/parallel.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

namespace jitkern {

namespace {

constexpr const char* kOp = "h2d_gather";
constexpr int kDefaultSms = 2;  // 2 SMs reach what 132 do: the bus is the limit
constexpr int kSmallCallThreads = 256;
constexpr i64 kSmallCallBytes = 1 << 20;  // up to here a call is latency: spread it over the GPU

template <class Index>
void gather_cpu(const GatherParams& p, i64 row_bytes) {
  const auto* pairs = static_cast<const Index*>(p.pairs);
  const auto skipped = [&](i64 i) { return pairs[2 * i] < 0 || pairs[2 * i + 1] < 0; };
  for (i64 i = 0; i < p.num_pairs; ++i) {
    if (skipped(i)) continue;
    const char* note = "; nothing was written";
    if (pairs[2 * i] >= p.num_src_rows) {
      raise_index_error(kOp, "pairs[..., 0]", i, pairs[2 * i], p.num_src_rows, note);
    }
    if (pairs[2 * i + 1] >= p.num_dst_rows) {
      raise_index_error(kOp, "pairs[..., 1]", i, pairs[2 * i + 1], p.num_dst_rows, note);
    }
  }
  parallel_for(p.num_pairs, 2 * p.num_pairs * row_bytes, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      if (skipped(i)) continue;
      std::memcpy(p.dst + pairs[2 * i + 1] * p.dst_stride_bytes,
                  p.src + pairs[2 * i] * p.src_stride_bytes, row_bytes);
    }
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

// The device address of pinned rows; ValueError with the cure for pageable memory.
const char* pinned_rows(const Tensor& src, const Rows& rows) {
  if (rows.num_rows == 0) return rows.data;
  const PinnedRange range = pinned_range(rows.data);
  if (range.device_address == nullptr ||
      rows.data + rows.span_bytes() > range.begin + range.bytes) {
    src.value_error("pageable host memory",
                    "pinned host memory for a destination on a GPU; allocate it with "
                    "torch.empty(..., pin_memory=True) or call .pin_memory()");
  }
  return range.device_address;
}

void h2d_gather(AnyView src_arg, AnyView dst_arg, AnyView pairs_arg, AnyView slot_map_arg,
                AnyView num_sms_arg) {
  const Tensor src(kOp, "src", src_arg);
  const Tensor dst(kOp, "dst", dst_arg);
  const Tensor pairs_tensor(kOp, "pairs", pairs_arg);
  if (src.on_cuda()) src.value_error("device " + src.device_name(), "cpu");
  src.same_dtype(dst);
  pairs_tensor.same_device(dst);
  const Indices pairs(pairs_tensor);
  const DLTensor& pairs_dl = *pairs_tensor.dl;
  if (pairs_dl.ndim < 1 || pairs_dl.shape[pairs_dl.ndim - 1] != 2) {
    pairs_tensor.value_error("shape " + pairs_tensor.shape_text(),
                             "shape [..., 2] of (source row, destination row)");
  }
  const Rows src_rows(src);
  const Rows dst_rows(dst);
  same_row_bytes(src, src_rows, dst, dst_rows);
  GatherParams params{
      dst_rows.data, src_rows.data,   dst_rows.stride_bytes, src_rows.stride_bytes, pairs.data,
      nullptr,       pairs.count / 2, src_rows.num_rows,     dst_rows.num_rows,     0,
      nullptr};
  if (slot_map_arg.type_index() != tvm::ffi::TypeIndex::kTVMFFINone) {
    const Tensor slot_map_tensor(kOp, "slot_map", slot_map_arg);
    slot_map_tensor.same_device(dst);
    const Indices slot_map(slot_map_tensor);
    if (slot_map_tensor.dl->ndim != 1 || slot_map.count != src_rows.num_rows) {
      slot_map_tensor.value_error(
          "shape " + slot_map_tensor.shape_text(),
          "shape [" + std::to_string(src_rows.num_rows) + "], one entry for each row of src");
    }
    if (slot_map.index_bytes == 4 && dst_rows.num_rows > std::numeric_limits<i32>::max()) {
      slot_map_tensor.type_error("dtype int32", "int64 for a dst of 2^31 or more rows");
    }
    params.slot_map = const_cast<void*>(slot_map.data);
    params.slot_map_bytes = slot_map.index_bytes;
  }
  const bool choose_sms = num_sms_arg.type_index() == tvm::ffi::TypeIndex::kTVMFFINone;
  const i64 num_sms = choose_sms ? kDefaultSms : int_arg(kOp, "num_sms", num_sms_arg);
  if (num_sms < 1) {
    throw tvm::ffi::Error(
        "ValueError",
        std::string(kOp) + ": num_sms: " + std::to_string(num_sms) + ", expected at least 1", "");
  }
  const i64 row_bytes = src_rows.row_bytes;
  const bool empty = row_bytes == 0 || params.num_pairs == 0;
  if (!dst.on_cuda()) {
    if (empty) return;
    pairs.index_bytes == 4 ? gather_cpu<int32_t>(params, row_bytes)
                           : gather_cpu<int64_t>(params, row_bytes);
    return;
  }
  static KernelTable kernels("h2d_gather", {"h2d_gather"});
  const LaunchScope scope(dst);
  params.src = pinned_rows(src, src_rows);
  if (empty) return;
  params.fault = scope.device.fault_device;
  const int vec_bytes = vec_bytes_for(row_bytes, address(params.src), address(dst_rows.data),
                                      src_rows.stride_bytes, dst_rows.stride_bytes);
  const bool line_aligned =
      (address(params.src) | u64(src_rows.stride_bytes)) % kHostLineBytes == 0;
  const bool small = choose_sms && params.num_pairs * row_bytes <= kSmallCallBytes;
  const int in_flight = small ? kSmallInFlight : kGatherInFlight;
  const Kernel& kernel = *kernels.find(
      scope.device, {row_bytes, vec_bytes, pairs.index_bytes, line_aligned, in_flight});
  const GroupShape shape = group_shape(window_bytes(row_bytes, vec_bytes, line_aligned), vec_bytes,
                                       kGatherMaxChunks, in_flight);
  const i64 threads = shape.num_threads(params.num_pairs);
  if (small) {
    scope.launch(kernel, ceil_div(threads, kSmallCallThreads), 1, kSmallCallThreads, params);
    return;
  }
  const i64 blocks =
      std::min({num_sms, i64(scope.device.num_sms), ceil_div(threads, kernel.num_threads)});
  scope.launch(kernel, blocks, 1, kernel.num_threads, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(h2d_gather, h2d_gather);

}  // namespace

}  // namespace jitkern
