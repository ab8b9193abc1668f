// indexing on the device: output row i is weights row indices[i], or zeros outside the vocabulary.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "index.h"

namespace jitkern {

template <i64 kRowBytes, int kSplits, int kThreads, int kMaxOccupancy, bool kUsePdl, int kVecBytes,
          int kIndexBytes, int kInFlight, bool kPaged = false, i64 kHeadBytes = kRowBytes>
struct IndexKernel {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  static_assert(kHeadBytes % kVecBytes == 0, "a head is a whole number of vectors");
  using Params = IndexParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    using Rows = Group<kRowBytes, kVecBytes, kInFlight, kSplits>;
    static_assert(Rows::kShape.splits == kSplits, "no split is empty or too long");
    const auto* indices = static_cast<const Index<kIndexBytes>*>(p.indices);
    const Rows group(thread_number());
    wait_for_earlier_kernels<kUsePdl>();

    // Each step has its own loop: after a branch between two loads the second waits for the first.
    i64 index[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = group.first_row + r;
      index[r] = row < p.num_rows ? i64(indices[row]) : -1;
    }
    Vec<kVecBytes> value[Rows::kRows][Rows::kChunks];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = table_row(p, index[r]);
      const bool inside = row >= 0;
      const char* source = p.weights + (inside ? p.strides.template offset_of<kPaged>(row) : 0);
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        value[r][c] = Vec<kVecBytes>{};
        if (inside && group.offset(c) < kRowBytes) {
          const i64 place = p.strides.template place_of<kRowBytes, kHeadBytes>(group.offset(c));
          value[r][c] = load_vec<kVecBytes>(source + place);
        }
      }
    }
    let_next_kernel_start<kUsePdl>();
    bool fault = false;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = group.first_row + r;
      fault |= index[r] > p.last_index;
      char* target = p.output + row * p.output_stride_bytes;
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        if (row < p.num_rows && group.offset(c) < kRowBytes) {
          store_vec<kVecBytes>(target + group.offset(c), value[r][c]);
        }
      }
    }
    if (!fault || !group.reports()) return;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      if (index[r] <= p.last_index) continue;
      report_fault(p.fault, p.indices_site, group.first_row + r, index[r], p.last_index + 1);
    }
  }
};

}  // namespace jitkern
