// Lists this rank's rows of a peer_gather or peer_scatter, of any row size; see peer_rows.h.
#include "comm/peer_rows.h"
#include "ops/sort.cuh"

namespace jitkern {

// Finds each pair's place in the table, and counts the distinct rows per region.
template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct ListPeerPairs {
  using Params = PeerListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    if (number < p.num_pairs) p.places[number] = look_up(p, number);
  }

 private:
  static __device__ u32 look_up(const Params& p, i64 number) {
    const Int* pairs = static_cast<const Int*>(p.pairs);
    const i64 src_row = pairs[2 * number];
    const i64 dst_row = pairs[2 * number + 1];
    if (!is_inside_or_fault(p, number, src_row, dst_row)) return kNotListed;
    u32 place = 0;
    // In the end the table has the first pair that asks for a row, the same on every rank.
    const u32 owner = p.table == nullptr
                          ? static_cast<u32>(number)
                          : claim_row<Int>(p, static_cast<u32>(number), src_row, place);
    if (owner == number) {
      take_rank(p.regions, host_offset<kHostSide>(p, src_row, dst_row));
    } else {
      atomicMin(&p.table[place], static_cast<u32>(number));
    }
    return place;
  }
};

// Lists this rank's part in the order of regions, and the copies of all ranks.
template <int kIndexBytes, int kThreads, int kMaxOccupancy, HostSide kHostSide>
struct PlacePeerPairs {
  using Params = PeerListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    __shared__ u32 part_start;  // the begin of this rank's first region
    __shared__ i32 last_fetch;
    __shared__ u32 num_copies;
    __shared__ u32 copies_start;
    const u64 total = p.last_entries[2] + 1u;
    if (threadIdx.x == 0) {
      part_start = start_at_or_below(p, part_begin(total, p.rank, p.num_ranks));
      last_fetch = -1;
      num_copies = 0;
    }
    __syncthreads();
    const i64 number = thread_number();
    i64 owner = -1;  // the pair that fetches the row, if it is another one
    if (number < p.num_pairs && p.places[number] != kNotListed) {
      owner = p.table == nullptr ? number : i64(p.table[p.places[number]]);
      if (owner == number) {
        const i64 slot = fetch(p, number, total, part_start);
        if (slot >= 0) atomicMax(&last_fetch, static_cast<i32>(slot));
        owner = -1;
      }
    }
    u32 place = 0;
    const bool is_copy = owner >= 0 && owner < p.num_pairs;
    if (is_copy) place = atomicAdd(&num_copies, 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (last_fetch >= 0) atomicMax(reinterpret_cast<i32*>(&p.last_entries[0]), last_fetch);
      if (num_copies > 0) copies_start = atomicAdd(&p.last_entries[1], num_copies) + 1u;
    }
    __syncthreads();
    if (!is_copy) return;
    const Int* pairs = static_cast<const Int*>(p.pairs);
    Int* copy = static_cast<Int*>(p.copies) + 2 * i64(copies_start + place);
    copy[0] = pairs[2 * owner + 1];
    copy[1] = pairs[2 * number + 1];
  }

 private:
  // Lists the pair if its row is in this rank's part. Returns its slot, or -1.
  static __device__ i64 fetch(const Params& p, i64 number, u64 total, u32 part_start) {
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    const Int src_row = pair[0];
    const Int dst_row = pair[1];
    // Checked again: the pairs may have changed since they were counted.
    const u64 region = region_of(p.regions, host_offset<kHostSide>(p, src_row, dst_row));
    if (region >= kNumRegions) return -1;
    const u64 start = p.regions.starts[region];
    const u64 count = p.regions.last_ranks[region] + 1u;
    const u64 position = start + (hash_of_row(dst_row) * count >> 32);
    if (position >= total || position * p.num_ranks / total != p.rank) return -1;
    const u32 number_in_region = atomicAdd(&p.cursors[region], 1u) + 1u;
    const i64 slot = i64(start) - part_start + number_in_region;
    if (slot < 0 || slot >= p.num_pairs) return -1;
    Int* entry = static_cast<Int*>(p.fetches) + 2 * slot;
    entry[0] = src_row;
    entry[1] = dst_row;
    return slot;
  }

  // The start of the last region that begins at or before `position`.
  static __device__ u32 start_at_or_below(const Params& p, u64 position) {
    u32 low = 0;
    for (u32 step = kNumRegions / 2; step > 0; step /= 2) {
      if (p.regions.starts[low + step] <= position) low += step;
    }
    return p.regions.starts[low];
  }
};

}  // namespace jitkern
