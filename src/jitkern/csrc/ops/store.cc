// store_cache on the host: checks, CPU implementation, launch.
#include "store.h"

#include <jitkern/launch.h>

#include "host/cpu_copy.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "store_cache";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

void store_cpu(const Indices& indices, const StoreParams& p, i64 row_bytes) {
  if (row_bytes == 0) return;
  indices.check_below(p.num_slots);
  indices.with_index([&](const auto index_at) {
    // K and V in turn, so that an index comes from memory once: row 2 i is of K, row 2 i + 1 of V.
    copy_rows<kRandomTargets>(
        2 * p.num_rows, row_bytes, 2 * p.num_slots * row_bytes, [&p, index_at](i64 row) {
          const i64 i = row / 2;
          const i64 slot = index_at(i);
          const StoreParams::Copy& copy = p.copies[row % 2];
          const bool inside = is_below(slot, p.num_slots);
          return CpuRow{inside ? copy.cache + slot * copy.cache_stride_bytes : nullptr,
                        copy.rows + i * copy.row_stride_bytes};
        });
  });
}

void store(AnyView k_cache_arg, AnyView v_cache_arg, AnyView indices_arg, AnyView k_arg,
           AnyView v_arg) {
  const Rows k_cache(kOp, "k_cache", k_cache_arg);
  const Rows v_cache(kOp, "v_cache", v_cache_arg);
  const Indices indices(kOp, "indices", indices_arg);
  const Rows k(kOp, "k", k_arg);
  const Rows v(kOp, "v", v_arg);
  indices.same_device(k_cache);
  for (const Rows* rows : {&v_cache, &k, &v}) {
    rows->same_device(k_cache);
    rows->same_dtype(k_cache);
    rows->same_row_bytes(k_cache);
  }
  v_cache.same_num_rows(k_cache);
  if (indices.dl->ndim != 1) indices.value_error("shape " + indices.shape_text(), "1 dimension");
  k.one_per_index(indices);
  v.one_per_index(indices);
  indices.apart_from(k_cache);
  indices.apart_from(v_cache);

  StoreParams params{{{k_cache.data, k.data, k_cache.stride_bytes, k.stride_bytes},
                      {v_cache.data, v.data, v_cache.stride_bytes, v.stride_bytes}},
                     indices.data,
                     indices.count,
                     k_cache.num_rows,
                     kIndicesSite,
                     nullptr};
  if (!k_cache.on_cuda()) return store_cpu(indices, params, k_cache.row_bytes);
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes"}, row_shape);
  const Spec spec(k_cache.row_bytes, vec_bytes_for(k_cache, v_cache, k, v), indices.index_bytes);
  launch_rows(kernels, k_cache, spec, indices.count, params, 2);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_cache, store);

}  // namespace

}  // namespace jitkern
