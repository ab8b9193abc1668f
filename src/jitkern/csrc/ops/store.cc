// store_cache on the host: checks, CPU implementation, launch.
#include "store.h"

#include <jitkern/cpu_copy.h>
#include <jitkern/launch.h>
#include <tvm/ffi/function.h>

namespace jitkern {

namespace {

constexpr const char* kOp = "store_cache";

template <class Index>
void store_cpu(const StoreParams& p, i64 row_bytes) {
  const auto* indices = static_cast<const Index*>(p.indices);
  for (i64 i = 0; i < p.num_rows; ++i) {
    if (indices[i] >= p.num_slots) {
      raise_index_error(kOp, "indices", i, indices[i], p.num_slots, "; nothing was written");
    }
  }
  // K and V in turn, so that an index is read once: row 2 i is of K, row 2 i + 1 of V.
  copy_rows<kRandomTargets>(2 * p.num_rows, row_bytes, 2 * p.num_slots * row_bytes, [&](i64 row) {
    const i64 i = row / 2;
    const StoreParams::Copy& copy = p.copies[row % 2];
    char* slot = indices[i] < 0 ? nullptr : copy.cache + indices[i] * copy.cache_stride_bytes;
    return CpuRow{slot, copy.rows + i * copy.row_stride_bytes};
  });
}

void store(AnyView k_cache_arg, AnyView v_cache_arg, AnyView indices_arg, AnyView k_arg,
           AnyView v_arg) {
  const Tensor k_cache(kOp, "k_cache", k_cache_arg);
  const Tensor v_cache(kOp, "v_cache", v_cache_arg);
  const Tensor indices_tensor(kOp, "indices", indices_arg);
  const Tensor k(kOp, "k", k_arg);
  const Tensor v(kOp, "v", v_arg);
  for (const Tensor* tensor : {&v_cache, &indices_tensor, &k, &v}) tensor->same_device(k_cache);
  for (const Tensor* tensor : {&v_cache, &k, &v}) tensor->same_dtype(k_cache);
  const Indices indices(indices_tensor);
  const Rows k_slots(k_cache);
  const Rows v_slots(v_cache);
  const Rows k_rows(k);
  const Rows v_rows(v);
  same_row_bytes(v_cache, v_slots, k_cache, k_slots);
  same_row_bytes(k, k_rows, k_cache, k_slots);
  same_row_bytes(v, v_rows, k_cache, k_slots);
  same_num_rows(v_cache, v_slots, k_cache, k_slots);
  if (indices_tensor.dl->ndim != 1) {
    indices_tensor.value_error("shape " + indices_tensor.shape_text(), "1 dimension");
  }
  one_row_per_index(k, k_rows, indices_tensor);
  one_row_per_index(v, v_rows, indices_tensor);

  const i64 row_bytes = k_slots.row_bytes;
  const bool empty = row_bytes == 0 || indices.count == 0;
  StoreParams params{{{k_slots.data, k_rows.data, k_slots.stride_bytes, k_rows.stride_bytes},
                      {v_slots.data, v_rows.data, v_slots.stride_bytes, v_rows.stride_bytes}},
                     indices.data,
                     indices.count,
                     k_slots.num_rows,
                     nullptr};
  if (!k_cache.on_cuda()) {
    if (empty) return;
    indices.index_bytes == 4 ? store_cpu<int32_t>(params, row_bytes)
                             : store_cpu<int64_t>(params, row_bytes);
    return;
  }
  static KernelTable kernels("store", {"store"});
  const LaunchScope scope(k_cache);
  if (empty) return;
  params.fault = scope.device.fault_device;
  const int vec_bytes =
      vec_bytes_for(row_bytes, address(k_slots.data), address(v_slots.data), address(k_rows.data),
                    address(v_rows.data), k_slots.stride_bytes, v_slots.stride_bytes,
                    k_rows.stride_bytes, v_rows.stride_bytes);
  const Kernel& kernel = *kernels.find(scope.device, {row_bytes, vec_bytes, indices.index_bytes});
  const GroupShape shape = group_shape(row_bytes, vec_bytes, kStoreMaxChunks, kStoreInFlight);
  scope.launch(kernel, ceil_div(shape.num_threads(indices.count), kernel.num_threads), 2,
               kernel.num_threads, params, scope.device.use_pdl);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(store, store);

}  // namespace

}  // namespace jitkern
