// store_cache on the device: row i of K and V goes to slot indices[i] of the caches.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "store.h"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, bool kUsePdl, int kVecBytes,
          int kIndexBytes, int kInFlight, i64 kFirstRowBytes = kRowBytes, bool kPaged = false,
          i64 kHeadBytes = kRowBytes>
struct StoreKernel {
  static_assert(kRowBytes % kVecBytes == 0 && kFirstRowBytes % kVecBytes == 0,
                "a row is a whole number of vectors");
  static_assert(kFirstRowBytes <= kRowBytes, "shorter rows come first");
  static_assert(kFirstRowBytes == kRowBytes || !kPaged, "pages have rows of one size");
  static_assert(kHeadBytes % kVecBytes == 0, "a head is a whole number of vectors");
  using Params = StoreParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  // Rows of two sizes need different numbers of blocks, so the grid has one dimension. With two,
  // empty blocks cost 20 % of a large call.
  static __device__ void run(const Params& p) {
    if constexpr (kFirstRowBytes == kRowBytes) {
      copy_rows<kRowBytes>(p, p.copies[blockIdx.y], 0);
    } else if (blockIdx.x < p.first_blocks) {
      copy_rows<kFirstRowBytes>(p, p.copies[0], 0);
    } else {
      copy_rows<kRowBytes>(p, p.copies[1], p.first_blocks);
    }
  }

 private:
  template <i64 kBytes>
  static __device__ void copy_rows(const Params& p, const StoreParams::Copy& copy,
                                   u32 blocks_before) {
    using Rows = Group<kBytes, kVecBytes, kInFlight>;
    const auto* indices = static_cast<const Index<kIndexBytes>*>(p.indices);
    constexpr i64 kHead = kHeadBytes == kRowBytes ? kBytes : kHeadBytes;
    const Rows group(thread_number() - i64(blocks_before) * kThreads);
    wait_for_earlier_kernels<kUsePdl>();

    // One loop for each step: after a branch between two loads the second waits for the first. Rows
    // are read without their indices, so all loads are in flight together.
    i64 slot[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = group.first_row + r;
      slot[r] = row < p.num_rows ? i64(indices[row]) : -1;
    }
    Vec<kVecBytes> value[Rows::kRows][Rows::kChunks];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = group.first_row + r;
      const char* source = copy.rows + row * copy.row_stride_bytes;
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        if (row < p.num_rows && group.offset(c) < kBytes) {
          value[r][c] = load_vec<kVecBytes>(source + group.offset(c));
        }
      }
    }
    let_next_kernel_start<kUsePdl>();
    bool fault = false;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const bool inside = slot[r] >= 0 && slot[r] < p.num_slots && slot[r] != p.skip;
      fault |= slot[r] >= p.num_slots && slot[r] != p.skip;
      char* target = copy.cache + (inside ? copy.strides.template offset_of<kPaged>(slot[r]) : 0);
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        if (inside && group.offset(c) < kBytes) {
          const i64 place = copy.strides.template place_of<kBytes, kHead>(group.offset(c));
          store_vec<kVecBytes>(target + place, value[r][c]);
        }
      }
    }
    if (!fault || !group.reports()) return;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      if (slot[r] < p.num_slots || slot[r] == p.skip) continue;
      report_fault(p.fault, p.indices_site, group.first_row + r, slot[r], p.num_slots);
    }
  }
};

}  // namespace jitkern
