// Sorts the rows of a large call by regions of host memory before the copy.
//
// In a pool larger than the reach of the link's address translation, unsorted rows nearly always
// miss (48.7 GB/s of 656-byte rows fall to 25 at 4 GiB, 18 at 64 GiB on an H200). Sorted by region
// they hit. The order within a region does not matter, so this is a counting sort of one pass. Its
// kernels do not depend on the row size: one module serves all.
#pragma once

#include <jitkern/copy.cuh>

#include "pairs.h"

namespace jitkern {

// The region of an offset in host memory. Past the end: kNumRegions or more.
__device__ inline u64 region_of(const Regions& regions, i64 offset) {
  return u64(offset) >> regions.shift;
}

// Counts a row in its region. Returns its rank there.
__device__ inline u32 take_rank(const Regions& regions, i64 offset) {
  return atomicAdd(&regions.last_ranks[region_of(regions, offset)], 1u) + 1u;
}

// The place, below `num`, of the row with this rank; -1 if the row has changed since it was ranked.
__device__ inline i64 place_of(const Regions& regions, i64 offset, u32 rank, i64 num) {
  const u64 region = region_of(regions, offset);
  if (region >= kNumRegions) return -1;
  const i64 place = i64(regions.starts[region]) + rank;
  return place < num ? place : -1;
}

// Computes where the rows of each region start, a prefix sum: one block, four regions a thread.
template <int kThreads, int kMaxOccupancy>
struct ScanRegions {
  using Params = Regions;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    static_assert(kThreads * 4 == kNumRegions, "a thread reads and writes one uint4");
    __shared__ u32 warp_sums[kThreads / 32];
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    const uint4 last = reinterpret_cast<const uint4*>(p.last_ranks)[threadIdx.x];
    const u32 count = last.x + last.y + last.z + last.w + 4u;  // a last rank is the count - 1
    u32 sum = count;  // inclusive prefix sum over the lanes of the warp
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    u32 start = sum - count;
    for (int w = 0; w < warp; ++w) start += warp_sums[w];
    const u32 second = start + last.x + 1u;
    const u32 third = second + last.y + 1u;
    const u32 fourth = third + last.z + 1u;
    reinterpret_cast<uint4*>(p.starts)[threadIdx.x] = {start, second, third, fourth};
    // The last thread's regions end at the number of all rows.
    if (threadIdx.x == kThreads - 1) *p.last_entry = start + count - 1u;
  }
};

// -- pairs ---------------------------------------------------------------------------------------

template <HostSide kHostSide, class Params>
__device__ inline i64 host_offset(const Params& p, i64 src_row, i64 dst_row) {
  return kHostSide == kHostSource ? src_row * p.src_stride_bytes : dst_row * p.dst_stride_bytes;
}

__device__ inline u32 hash_of_row(i64 row) {
  return static_cast<u32>((u64(row) * 0x9e3779b97f4a7c15ull) >> 32);
}

// Whether both rows are inside. Negative rows are padding; a row past the end is reported as a
// fault.
template <class Params>
__device__ inline bool is_inside_or_fault(const Params& p, i64 number, i64 src_row, i64 dst_row) {
  if (src_row < 0 || dst_row < 0) return false;
  const bool src_inside = src_row < p.num_src_rows;
  if (src_inside && dst_row < p.num_dst_rows) return true;
  report_fault(p.fault, src_inside ? p.dst_site : p.src_site, number,
               src_inside ? dst_row : src_row, src_inside ? p.num_dst_rows : p.num_src_rows);
  return false;
}

// The pair that owns `src_row` (`number`, if no other pair was first), and its place in the table.
// The table has at least twice as many places as there are pairs, so a free place is near.
template <class Int, class Params>
__device__ inline u32 claim_row(const Params& p, u32 number, i64 src_row, u32& place) {
  place = hash_of_row(src_row) & p.table_mask;
  while (true) {
    const u32 owner = atomicCAS(&p.table[place], kNoOwner, number);
    if (owner == kNoOwner) return number;
    if (static_cast<const Int*>(p.pairs)[2 * i64(owner)] == src_row) return owner;
    place = (place + 1) & p.table_mask;
  }
}

// Lists the pairs in any order, or ranks those to fetch for PlacePairs.
template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct ListPairs {
  using Params = ListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    __shared__ u32 block_counts[2];
    __shared__ u32 block_starts[2];
    if (threadIdx.x < 2) block_counts[threadIdx.x] = 0;
    __syncthreads();
    const i64 number = thread_number();
    Entry entry = number < p.num_pairs ? look_up(p, number) : Entry{kSkip, 0, 0};
    if (p.ranks != nullptr && number < p.num_pairs) {
      p.ranks[number] = rank_of(p, entry);
      if (entry.list == kFetch) entry.list = kSkip;  // PlacePairs lists it
    }
    u32 place = 0;
    if (entry.list != kSkip) place = atomicAdd(&block_counts[entry.list], 1u);
    __syncthreads();
    // One atomic per block and list on the global counters.
    if (threadIdx.x < 2) {
      block_starts[threadIdx.x] =
          atomicAdd(&p.last_entries[threadIdx.x], block_counts[threadIdx.x]) + 1u;
    }
    __syncthreads();
    if (entry.list == kSkip) return;
    place += block_starts[entry.list];
    Int* pair = static_cast<Int*>(entry.list == kFetch ? p.fetches : p.copies) + 2 * i64(place);
    pair[0] = static_cast<Int>(entry.from_row);
    pair[1] = static_cast<Int>(entry.dst_row);
  }

 private:
  enum List : i32 { kSkip = -1, kFetch = 0, kCopy = 1 };

  struct Entry {
    List list;
    i64 from_row;
    i64 dst_row;
  };

  static __device__ u32 rank_of(const Params& p, const Entry& entry) {
    if (entry.list != kFetch) return kNotListed;
    return take_rank(p.regions, host_offset<kHostSide>(p, entry.from_row, entry.dst_row));
  }

  static __device__ Entry look_up(const Params& p, i64 number) {
    const Int* pairs = static_cast<const Int*>(p.pairs);
    const i64 src_row = pairs[2 * number];
    const i64 dst_row = pairs[2 * number + 1];
    if (!is_inside_or_fault(p, number, src_row, dst_row)) return {kSkip, 0, 0};
    if (p.table == nullptr) return {kFetch, src_row, dst_row};
    u32 place = 0;
    const u32 owner = claim_row<Int>(p, static_cast<u32>(number), src_row, place);
    if (owner == number) return {kFetch, src_row, dst_row};
    return {kCopy, i64(pairs[2 * i64(owner) + 1]), dst_row};
  }
};

// Writes the list of fetches in the order of their regions.
template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct PlacePairs {
  using Params = ListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    if (number >= p.num_pairs) return;
    const u32 rank = p.ranks[number];
    if (rank == kNotListed) return;
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    const Int src_row = pair[0];
    const Int dst_row = pair[1];
    const i64 offset = host_offset<kHostSide>(p, src_row, dst_row);
    const i64 place = place_of(p.regions, offset, rank, p.num_pairs);
    if (place < 0) return;
    Int* fetch = static_cast<Int*>(p.fetches) + 2 * place;
    fetch[0] = src_row;
    fetch[1] = dst_row;
  }
};

}  // namespace jitkern
