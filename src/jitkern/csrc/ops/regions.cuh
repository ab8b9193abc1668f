// Sorting the rows of a large call by their regions of the host's memory.
//
// On a pool larger than the reach of the link's address translation, rows as they come miss in it
// at nearly every row (48.7 GB/s of 656-byte rows fall to 25 at 4 GiB, 18 at 64 GiB on an H200). In
// the order of their regions they hit; which row of a region comes first does not matter, so this
// is a counting sort of one pass.
#pragma once

#include <jitkern/copy.cuh>

#include "regions.h"

namespace jitkern {

// Of the `offset` in the host's memory. Past the end it is kNumRegions or more.
__device__ inline u64 region_of(const Regions& regions, i64 offset) {
  return u64(offset) >> regions.shift;
}

// The row's number in its region.
__device__ inline u32 take_rank(const Regions& regions, u64 region, u32 kind = 0) {
  return atomicAdd(&regions.last_ranks[kind * kNumRegions + region], 1u) + 1u;
}

// Where the rows of each region start: one block, four regions a thread, a kind of rows at a time.
template <int kThreads, int kMaxOccupancy>
struct ScanRegions {
  using Params = Regions;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    static_assert(kThreads * 4 == kNumRegions, "a uint4 is what a thread reads and writes");
    __shared__ u32 warp_sums[kThreads / 32];
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    u32 start = 0;  // of the kind, then of the thread's regions
    for (u32 kind = 0; kind < p.num_kinds; ++kind) {
      const u32 four = kind * kThreads + threadIdx.x;
      const uint4 last = reinterpret_cast<const uint4*>(p.last_ranks)[four];
      const u32 count = last.x + last.y + last.z + last.w + 4u;  // the last number of none is -1
      u32 sum = count;                                           // of the lanes up to this one
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      if (lane == 31) warp_sums[warp] = sum;
      __syncthreads();
      const u32 kind_start = start;
      start += sum - count;
      for (int w = 0; w < warp; ++w) start += warp_sums[w];
      const u32 second = start + last.x + 1u;
      const u32 third = second + last.y + 1u;
      reinterpret_cast<uint4*>(p.starts)[four] = {start, second, third, third + last.z + 1u};
      start = kind_start;
      for (const u32 warp_sum : warp_sums) start += warp_sum;
      __syncthreads();  // before the sums are those of the next kind
    }
    if (threadIdx.x == 0) *p.last_entry = start - 1u;
  }
};

}  // namespace jitkern
