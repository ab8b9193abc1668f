// Sorting the pairs of a large call in front of its copy, which PairCopy then makes from the lists.
#pragma once

#include "pair_lists.h"
#include "regions.cuh"

namespace jitkern {

template <HostSide kHostSide, class Params>
__device__ inline u64 region_of_pair(const Params& p, i64 src_row, i64 dst_row) {
  return region_of(p.regions, kHostSide == kHostSource ? src_row * p.src_stride_bytes
                                                       : dst_row * p.dst_stride_bytes);
}

__device__ inline u32 hash_of_row(i64 row) {
  return static_cast<u32>((u64(row) * 0x9e3779b97f4a7c15ull) >> 32);
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
    if (found.list != kFetch) return kNotListed;
    return take_rank(p.regions, region_of_pair<kHostSide>(p, found.from_row, found.dst_row));
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
    u32 place = hash_of_row(src_row) & p.table_mask;
    while (true) {
      const u32 owner = atomicCAS(&p.table[place], kNoOwner, number);
      if (owner == kNoOwner) return number;
      if (pairs[2 * i64(owner)] == src_row) return owner;
      place = (place + 1) & p.table_mask;
    }
  }
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
    if (rank == kNotListed) return;
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    const Int src_row = pair[0];
    const Int dst_row = pair[1];
    // Compared again: the pairs may have changed since `list` read them.
    const u64 region = region_of_pair<kHostSide>(p, src_row, dst_row);
    if (region >= kNumRegions) return;
    const i64 place = i64(p.regions.starts[region]) + rank;
    if (place >= p.num_pairs) return;
    Int* fetch = static_cast<Int*>(p.fetches) + 2 * place;
    fetch[0] = src_row;
    fetch[1] = dst_row;
  }
};

}  // namespace jitkern
