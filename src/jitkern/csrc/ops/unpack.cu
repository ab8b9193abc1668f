// unpack on the device: descriptors of pieces of any size and alignment.
//
// The warps of the first blocks are divided among the descriptors; few descriptors get many warps
// each. They copy a descriptor as soon as they have read it, but only the start of a long one: the
// last blocks read all descriptors, compute a prefix sum of the rests and copy the rests in units.
// The first blocks do not wait for that sum: 2,048 x 256 bytes take 1.7 us this way, 3.5 if all
// blocks sum first, 3.2 if the blocks of a cluster share the sum, as clusters are slow to launch.
// If no descriptor can be that long there are no last blocks.
#include <jitkern/pdl.cuh>

#include "unpack.cuh"

namespace jitkern {

template <int kFormat, int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kPieceInFlight,
          u32 kInFlight, u32 kPartsInFlight, u32 kShortSegments, u32 kOwnSegments,
          u32 kFirstSegments, u32 kUnitSegments>
struct Unpack {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
  static_assert(kShortSegments <= kOwnSegments, "a short descriptor has no rest");
  static_assert(kFirstSegments >= 4 && kFirstSegments <= kOwnSegments, "see own_segments");
  using Params = UnpackParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;
  static constexpr u32 kChunk = 4 * kThreads;  // descriptors that are summed at once

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    const u32 num = num_descriptors(p);
    const u32 copiers = p.num_copiers * kWarps;
    const Team team(num, blockIdx.x * kWarps + threadIdx.x / 32, copiers);
    if (blockIdx.x >= p.num_copiers) {
      if (__syncthreads_or(see_rest(p, num, team))) deal_rests(p, num, team);
    } else {
      for (u32 i = team.descriptor; i < num; i += team.num_teams)
        copy_own(p, team, i, pieces_of(p, i));
    }
  }

 private:
  // -- descriptors

  static __device__ u32 num_descriptors(const Params& p) {
    if (p.count == nullptr) return p.num_descriptors;
    const i64 count =
        p.count_bytes == 4 ? *static_cast<const i32*>(p.count) : *static_cast<const i64*>(p.count);
    return count < 0 ? 0 : count < p.num_descriptors ? static_cast<u32>(count) : p.num_descriptors;
  }

  static __device__ Pieces pieces_of(const Params& p, u64 i) {
    const i64* row = static_cast<const i64*>(p.descriptors) + kFormat * i;
    if constexpr (kFormat == kTriples) return {row[0], row[1], row[2], 1, 0, 0};
    return {row[0], row[1], row[2], row[3], row[4], row[5]};
  }

  // -- first blocks: each descriptor by its own warps

  // The number of segments that a descriptor's own warps copy, all partial segments among them.
  static __device__ u32 own_segments(const Params& p, const Team& team, const Work& work) {
    const bool is_dealt = gridDim.x > p.num_copiers;
    if (!is_dealt || work.num_segments() <= most_segments(team)) return work.num_segments();
    return team.warps * kFirstSegments;
  }
  static __device__ u64 most_segments(const Team& team) { return u64(team.warps) * kOwnSegments; }

  static __device__ void copy_own(const Params& p, const Team& team, u32 i, const Pieces& pieces) {
    if (is_short(p, pieces, u64(team.warps) * kShortSegments)) {
      return copy_piece<kPieceInFlight>(p, pieces, team.warp, team.warps);
    }
    const Work work = checked_work(p, pieces, i, team.warp == 0 && threadIdx.x % 32 == 0);
    const u32 own = own_segments(p, team, work);
    copy_share<kInFlight, kPartsInFlight>(p, work, own, team.warp, team.warps);
  }

  // -- last blocks: the rests of long descriptors

  // Whether a descriptor in this thread's share may have a rest.
  static __device__ bool see_rest(const Params& p, u32 num, const Team& team) {
    bool seen = false;
    for (u64 i = threadIdx.x; i < num; i += kThreads) {
      const Pieces pieces = pieces_of(p, i);
      seen |= is_longer(pieces.len, pieces.count, most_segments(team));
    }
    return seen;
  }

  struct Rests {
    u64 starts[kChunk + 1];  // the first unit of each descriptor; last: the number of all units
    u64 warp_sums[kWarps];
  };

  static __device__ u64 rest_units(const Params& p, u32 i, const Team& team) {
    const Work work = checked_work(p, pieces_of(p, i), i, false);
    return (work.num_segments() - own_segments(p, team, work) + kUnitSegments - 1) / kUnitSegments;
  }

  // The position of the last of `size` rising numbers that is <= `value`; the first number is 0.
  // All lanes call it.
  static __device__ u32 find_last(const u64* rising, u32 size, u64 value) {
    u32 base = 0;
    for (u32 width = size; width > 1;) {
      const u32 step = (width + 31) / 32;
      const u32 at = threadIdx.x % 32 * step;
      const bool below = at < width && base + at < size && rising[base + at] <= value;
      base += (__popc(__ballot_sync(kAllLanes, below)) - 1) * step;
      width = step;
    }
    return base;
  }

  static __device__ void deal_rests(const Params& p, u32 num, const Team& team) {
    __shared__ Rests rests;
    const u64 dealers = u64(gridDim.x - p.num_copiers) * kWarps;
    u64 unit = u64(blockIdx.x - p.num_copiers) * kWarps + threadIdx.x / 32;
    for (u32 chunk = 0; chunk < num; chunk += kChunk) {
      const u32 size = num - chunk < kChunk ? num - chunk : kChunk;
      sum_units(p, chunk, size, team, rests);
      for (; unit < rests.starts[kChunk]; unit += dealers) {
        const u32 i = find_last(rests.starts, size, unit);
        copy_unit(p, team, chunk + i, unit - rests.starts[i]);
      }
      unit -= rests.starts[kChunk];  // this warp's first unit of the next chunk
      __syncthreads();               // before the starts are overwritten
    }
  }

  static __device__ void copy_unit(const Params& p, const Team& team, u32 i, u64 unit) {
    const Work work = checked_work(p, pieces_of(p, i), i, false);
    const u32 num_segments = work.num_segments();
    const u64 first = own_segments(p, team, work) + unit * kUnitSegments;
    if (first >= num_segments) return;  // the descriptor was rewritten meanwhile
    const u32 begin = static_cast<u32>(first);
    const u32 end = num_segments - begin < kUnitSegments ? num_segments : begin + kUnitSegments;
    copy_segments<kInFlight, kPartsInFlight>(p, work, begin, end);
  }

  // The sum over the lanes up to this one. Not unrolled, so that the kernel fits its registers.
  static __device__ u64 sum_of_lanes(u64 sum) {
#pragma unroll 1
    for (u32 step = 1; step < 32; step *= 2) {
      const u64 other = __shfl_up_sync(kAllLanes, sum, step);
      if (threadIdx.x % 32 >= step) sum += other;
    }
    return sum;
  }

  // Fills `rests.starts`. All threads of the block call it.
  static __device__ void sum_units(const Params& p, u32 chunk, u32 size, const Team& team,
                                   Rests& rests) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    u64 total = 0;
    for (u32 begin = 0; begin < size; begin += kThreads) {
      const u32 number = begin + threadIdx.x;
      const u64 units = number < size ? rest_units(p, chunk + number, team) : 0;
      const u64 sum = sum_of_lanes(units);
      if (lane == 31) rests.warp_sums[warp] = sum;
      __syncthreads();
      const u64 warps = sum_of_lanes(lane < kWarps ? rests.warp_sums[lane] : 0);
      const u64 before = __shfl_sync(kAllLanes, warps, static_cast<int>((warp + 31) % 32));
      const u64 start = total + (warp == 0 ? 0 : before) + sum - units;
      total += __shfl_sync(kAllLanes, warps, 31);
      if (number < size) rests.starts[number] = start;
      if (threadIdx.x == 0) rests.starts[kChunk] = total;
      __syncthreads();  // before the sums are overwritten
    }
  }
};

}  // namespace jitkern
