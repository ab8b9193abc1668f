// store_cache on the device: row i of K and V goes to slot indices[i] of the caches.
#include <jitkern/copy.cuh>
#include <jitkern/fault.cuh>
#include <jitkern/pdl.cuh>

#include "store.h"

namespace jitkern {

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy,
          bool kUsePdl>
struct StoreKernel {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  using Params = StoreParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    using Rows = FlatRows<kRowBytes / kVecBytes>;
    const StoreParams::Copy& copy = p.copies[blockIdx.y];
    const auto* indices = static_cast<const Index<kIndexBytes>*>(p.indices);
    const i64 num_vecs = p.num_rows * (kRowBytes / kVecBytes);
    const i64 first = i64(blockIdx.x) * (kThreads * kStoreUnroll) + threadIdx.x;
    wait_for_earlier_kernels<kUsePdl>();

    // Rows do not depend on the indices, so all loads are in flight together.
    Vec<kVecBytes> value[kStoreUnroll];
    i64 slot[kStoreUnroll];
#pragma unroll
    for (int j = 0; j < kStoreUnroll; ++j) {
      const i64 flat = first + j * kThreads;
      slot[j] = -1;
      if (flat >= num_vecs) continue;
      const Rows at(flat);
      slot[j] = indices[at.row];
      value[j] = load_once<kVecBytes>(copy.rows + at.row * copy.row_stride_bytes +
                                      i64(at.vec) * kVecBytes);
    }
    let_next_kernel_start<kUsePdl>();
#pragma unroll
    for (int j = 0; j < kStoreUnroll; ++j) {
      if (slot[j] < 0) continue;  // padding, or past the last row
      const Rows at(first + j * kThreads);
      if (slot[j] >= p.num_slots) {
        if (at.vec == 0) {
          report_fault(p.fault, FaultSite::kStoreIndices, at.row, slot[j], p.num_slots);
        }
        continue;
      }
      store_once<kVecBytes>(
          copy.cache + slot[j] * copy.cache_stride_bytes + i64(at.vec) * kVecBytes, value[j]);
    }
  }
};

}  // namespace jitkern
