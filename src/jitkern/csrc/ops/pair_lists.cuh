// Sorting the pairs of a large call in front of its copy, which PairCopy then makes from the lists.
//
// On a pool larger than the reach of the link's address translation, rows as they come miss in it
// at nearly every row (48.7 GB/s of 656-byte rows fall to 25 at 4 GiB, 18 at 64 GiB on an H200). In
// the order of their region of the host's memory they hit; which row of a region comes first
// matters little, so this is a counting sort of one pass over as many regions as fit one small
// scan.
#pragma once

#include <jitkern/copy.cuh>

#include "pair_lists.h"

namespace jitkern {

template <HostSide kHostSide>
__device__ inline u64 region_of(const ListParams& p, i64 src_row, i64 dst_row) {
  const i64 offset =
      kHostSide == kHostSource ? src_row * p.src_stride_bytes : dst_row * p.dst_stride_bytes;
  return u64(offset) >> p.region_shift;
}

template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct ListPairs {
  using Params = ListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    __shared__ u32 block_counts[2];
    __shared__ u32 block_starts[2];
    if (threadIdx.x < 2) block_counts[threadIdx.x] = 0;
    __syncthreads();
    const i64 number = thread_number();
    Found found = number < p.num_pairs ? look_up(p, number) : Found{kSkip, 0, 0, 0};
    if (p.ranks != nullptr && number < p.num_pairs) {
      p.ranks[number] = rank_of(p, found);
      if (found.list == kFetch) found.list = kSkip;  // `place` lists it
    }
    u32 place = 0;
    if (found.list != kSkip) place = atomicAdd(&block_counts[found.list], 1u);
    __syncthreads();
    // One atomic for each list and block on the global counters.
    if (threadIdx.x < 2) {
      block_starts[threadIdx.x] =
          atomicAdd(&p.last_entries[threadIdx.x], block_counts[threadIdx.x]) + 1u;
    }
    __syncthreads();
    if (found.list == kSkip) return;
    place += block_starts[found.list];
    Int* pair = static_cast<Int*>(found.list == kFetch ? p.fetches : p.copies) + 2 * i64(place);
    pair[0] = static_cast<Int>(found.from_row);
    pair[1] = static_cast<Int>(found.dst_row);
    if (found.list == kCopy) {
      static_cast<Int*>(p.copied_rows)[place] = static_cast<Int>(found.slot_row);
    }
  }

 private:
  enum List : i32 { kSkip = -1, kFetch = 0, kCopy = 1 };

  struct Found {
    List list;
    i64 from_row;
    i64 dst_row;
    i64 slot_row;  // of kCopy: see ListParams::copied_rows
  };

  static __device__ u32 rank_of(const Params& p, const Found& found) {
    if (found.list != kFetch) return kNotFetched;
    const u64 region = region_of<kHostSide>(p, found.from_row, found.dst_row);
    return atomicAdd(&p.last_ranks[region], 1u) + 1u;
  }

  static __device__ Found look_up(const Params& p, i64 number) {
    const Int* pairs = static_cast<const Int*>(p.pairs);
    const i64 src_row = pairs[2 * number];
    const i64 dst_row = pairs[2 * number + 1];
    if (src_row < 0 || dst_row < 0) return {kSkip, 0, 0, 0};  // padding
    if (src_row >= p.num_src_rows) {
      report_fault(p.fault, p.src_site, number, src_row, p.num_src_rows);
      return {kSkip, 0, 0, 0};
    }
    if (dst_row >= p.num_dst_rows) {
      report_fault(p.fault, p.dst_site, number, dst_row, p.num_dst_rows);
      return {kSkip, 0, 0, 0};
    }
    if (p.slot_map != nullptr) {
      const i64 slot = p.slot_map_bytes == 4 ? i64(static_cast<const i32*>(p.slot_map)[src_row])
                                             : static_cast<const i64*>(p.slot_map)[src_row];
      if (slot >= p.num_dst_rows) {
        report_fault(p.fault, p.slot_map_site, src_row, slot, p.num_dst_rows);
        return {kSkip, 0, 0, 0};
      }
      if (slot >= 0) return {kCopy, slot, dst_row, src_row};
    }
    if (p.table == nullptr) return {kFetch, src_row, dst_row, 0};
    const u32 owner = claim(p, pairs, static_cast<u32>(number), src_row);
    if (owner == number) return {kFetch, src_row, dst_row, 0};
    return {kCopy, i64(pairs[2 * i64(owner) + 1]), dst_row, -1};
  }

  // The pair that fetches `src_row`: this one if it is the first to come. The table is at least
  // twice as large as the number of pairs, so a free place is never far.
  static __device__ u32 claim(const Params& p, const Int* pairs, u32 number, i64 src_row) {
    u32 place = static_cast<u32>((u64(src_row) * 0x9e3779b97f4a7c15ull) >> 32) & p.table_mask;
    while (true) {
      const u32 owner = atomicCAS(&p.table[place], kNoOwner, number);
      if (owner == kNoOwner) return number;
      if (pairs[2 * i64(owner)] == src_row) return owner;
      place = (place + 1) & p.table_mask;
    }
  }
};

// Where the fetches of each region start, four regions a thread. Each block sums up all regions in
// front of its own by itself: 64 blocks read 32 MB of L2 in all, and wait for nobody.
template <int kThreads, int kMaxOccupancy>
struct ScanRegions {
  using Params = ListParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    constexpr int kWarps = kThreads / 32;
    static_assert(kWarps <= 32, "one warp sums up those of the block");
    static_assert(kScanRegionsPerThread == 4, "a uint4 is what a thread reads and writes");
    __shared__ u32 warp_sums[2][32];
    const auto* fours = reinterpret_cast<const uint4*>(p.last_ranks);
    const u32 own = static_cast<u32>(thread_number());
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    u32 before = 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < blockIdx.x * kThreads; i += kThreads) before += total(fours[i]);
    const uint4 last = fours[own];
    const u32 count = total(last);
    u32 sum = count;  // of the lanes up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
      before += __shfl_xor_sync(0xffffffffu, before, step);
    }
    if (lane == 31) warp_sums[0][warp] = sum;
    if (lane == 31) warp_sums[1][warp] = before;
    __syncthreads();
    u32 start = sum - count;
    for (int w = 0; w < kWarps; ++w) start += warp_sums[1][w] + (w < warp ? warp_sums[0][w] : 0u);
    const u32 second = start + last.x + 1u;
    const u32 third = second + last.y + 1u;
    reinterpret_cast<uint4*>(p.region_starts)[own] = {start, second, third, third + last.z + 1u};
    if (own == p.num_regions / kScanRegionsPerThread - 1) p.last_entries[0] = start + count - 1u;
  }

 private:
  // The fetches of four regions: the last place of none is -1.
  static __device__ u32 total(const uint4& last) { return last.x + last.y + last.z + last.w + 4u; }
};

// Writes the list of fetches in the order of their regions.
template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct PlacePairs {
  using Params = ListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    if (number >= p.num_pairs) return;
    const u32 rank = p.ranks[number];
    if (rank == kNotFetched) return;
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    const Int src_row = pair[0];
    const Int dst_row = pair[1];
    // Compared again: the pairs may have changed since `list` read them.
    const u64 region = region_of<kHostSide>(p, src_row, dst_row);
    if (region >= p.num_regions) return;
    const i64 place = i64(p.region_starts[region]) + rank;
    if (place >= p.num_pairs) return;
    Int* fetch = static_cast<Int*>(p.fetches) + 2 * place;
    fetch[0] = src_row;
    fetch[1] = dst_row;
  }
};

}  // namespace jitkern
