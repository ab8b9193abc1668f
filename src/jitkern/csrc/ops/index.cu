// indexing on the device: output row i is weights row indices[i], or zeros outside the vocabulary.
#include <jitkern/copy.cuh>
#include <jitkern/fault.cuh>
#include <jitkern/pdl.cuh>

#include "index.h"

namespace jitkern {

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy,
          bool kUsePdl>
struct IndexKernel {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  using Params = IndexParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    using Rows = FlatRows<kRowBytes / kVecBytes>;
    const auto* indices = static_cast<const Index<kIndexBytes>*>(p.indices);
    const i64 num_vecs = p.num_rows * (kRowBytes / kVecBytes);
    const i64 first = i64(blockIdx.x) * (kThreads * kIndexUnroll) + threadIdx.x;
    wait_for_earlier_kernels<kUsePdl>();

    i64 index[kIndexUnroll];
#pragma unroll
    for (int j = 0; j < kIndexUnroll; ++j) {
      const i64 flat = first + j * kThreads;
      index[j] = flat < num_vecs ? i64(indices[Rows(flat).row]) : -1;
    }
    Vec<kVecBytes> value[kIndexUnroll];
#pragma unroll
    for (int j = 0; j < kIndexUnroll; ++j) {
      value[j] = Vec<kVecBytes>{};
      const i64 row = index[j] < 0 ? -1 : index[j] - p.vocab_start;
      if (row < 0 || row >= p.vocab_length) continue;
      const Rows at(first + j * kThreads);
      value[j] = load_once<kVecBytes>(p.weights + row * p.weights_stride_bytes +
                                      i64(at.vec) * kVecBytes);
    }
    let_next_kernel_start<kUsePdl>();
#pragma unroll
    for (int j = 0; j < kIndexUnroll; ++j) {
      const i64 flat = first + j * kThreads;
      if (flat >= num_vecs) continue;
      const Rows at(flat);
      if (index[j] >= p.bound && at.vec == 0) {
        report_fault(p.fault, FaultSite::kIndexingIndices, at.row, index[j], p.bound);
      }
      store_once<kVecBytes>(
          p.output + at.row * p.output_stride_bytes + i64(at.vec) * kVecBytes, value[j]);
    }
  }
};

}  // namespace jitkern
