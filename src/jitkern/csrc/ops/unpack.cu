// unpack on the device: pieces of any size and alignment, as descriptors ask for them.
//
// Who copies what. Each descriptor has `warps_each` warps for itself, or, where there are more
// descriptors than warps, one that goes on to others. No sum over the descriptors comes in front,
// which of small ones takes longer than their copy. What is too long for its own warps they only
// begin: the rest is dealt to all warps of the grid, in units, which takes a sum over what is left.
// Each block finds out by itself whether there is a rest, as blocks have no memory that they share:
// it reads the lengths of all descriptors, while its first vectors come.
#include <jitkern/pdl.cuh>

#include "unpack.cuh"

namespace jitkern {

template <int kFormat, int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments, u32 kFirstSegments, u32 kUnitSegments>
struct Unpack {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, as many as lanes");
  static_assert(kFirstSegments >= 4 && kFirstSegments <= kOwnSegments, "see own_segments");
  using Params = UnpackParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;
  static constexpr u32 kChunk = 4 * kThreads;  // descriptors that are summed at once

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    const u32 num = num_descriptors(p);
    if (__syncthreads_or(copy_own(p, num))) deal_rests(p, num);
  }

 private:
  // -- descriptors

  static __device__ u32 num_descriptors(const Params& p) {
    if (p.count == nullptr) return p.num_descriptors;
    const i64 count =
        p.count_bytes == 4 ? *static_cast<const i32*>(p.count) : *static_cast<const i64*>(p.count);
    return count < 0 ? 0 : count < p.num_descriptors ? static_cast<u32>(count) : p.num_descriptors;
  }

  struct Sizes {
    i64 len;
    i64 count;
  };

  static __device__ Sizes sizes_of(const Params& p, u64 i) {
    if constexpr (kFormat == kStructs) {
      const uint2 sizes = static_cast<const uint2*>(p.descriptors)[6 * i + 2];
      return {i64(sizes.x), i64(sizes.y)};
    } else {
      const i64* row = static_cast<const i64*>(p.descriptors) + kFormat * i;
      return {row[2], kFormat == kSextuples ? row[3] : 1};
    }
  }

  static __device__ Pieces pieces_of(const Params& p, u64 i) {
    if constexpr (kFormat == kStructs) {
      const auto* vectors = static_cast<const uint4*>(p.descriptors) + 3 * i;
      const uint4 offsets = vectors[0], sizes = vectors[1], stride = vectors[2];
      return {
          joined(offsets.x, offsets.y), joined(offsets.z, offsets.w), i64(sizes.x), i64(sizes.y),
          joined(sizes.z, sizes.w),     joined(stride.x, stride.y)};
    } else {
      const i64* row = static_cast<const i64*>(p.descriptors) + kFormat * i;
      if constexpr (kFormat == kTriples) return {row[0], row[1], row[2], 1, 0, 0};
      return {row[0], row[1], row[2], row[3], row[4], row[5]};
    }
  }

  static __device__ i64 joined(u32 low, u32 high) {
    return static_cast<i64>(u64(high) << 32 | low);
  }

  // Of a descriptor that is out of range there are no segments. It is reported by one thread that
  // `reports`.
  static __device__ Work read_work(const Params& p, u32 i, bool reports) {
    const Pieces pieces = pieces_of(p, i);
    const Verdict verdict = verdict_on(pieces, p.src_bytes, p.dst_bytes);
    if (verdict.part == kNumParts) return work_of(p, pieces);
    if (reports) report_fault(p.fault, p.sites[verdict.part], i, verdict.value, verdict.bound);
    return {};
  }

  // -- first: each descriptor by warps of its own

  // Neighbours are on different SMs, so that a few descriptors are spread over all.
  static __device__ u32 warp_number() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

  // How many of its segments its own warps copy: all parts of a single piece are among them.
  static __device__ u32 own_segments(const Params& p, const Work& work) {
    if (work.num_segments() <= u64(p.warps_each) * kOwnSegments) return work.num_segments();
    return p.warps_each * kFirstSegments;
  }

  // Whether there may be a rest, by what is read quickly: at least where work_of has more segments.
  static __device__ bool may_leave_rest(const Params& p, const Sizes& sizes) {
    if (sizes.len <= 0 || sizes.count <= 0) return false;
    const u64 slots =
        product(static_cast<u64>(sizes.count), (static_cast<u64>(sizes.len) >> 4) + 9);
    return slots > u64(p.warps_each) * kOwnSegments * 32;
  }

  // Part `part` of those of a descriptor.
  template <class Meanwhile>
  static __device__ void copy_own_part(const Params& p, const Work& work, u32 part,
                                       const Meanwhile& meanwhile) {
    const u32 own = own_segments(p, work);
    const u32 parts = work.num_parts < own ? work.num_parts : own;
    const u32 step = p.warps_each * kPartsInFlight;
    for (u32 begin = part * kPartsInFlight; begin < parts; begin += step) {
      const u32 end = begin + kPartsInFlight;
      copy_parts<kPartsInFlight>(p, work, begin, end < parts ? end : parts, meanwhile);
    }
    // Whole ones by the warps that had none of these first. Few are spread over all warps, of many
    // each has as many as it can at a time.
    const u32 pairs = (parts + kPartsInFlight - 1) / kPartsInFlight;
    const u32 busy = pairs < p.warps_each ? pairs : p.warps_each;
    const u32 turn = part >= busy ? part - busy : part + p.warps_each - busy;
    const u32 whole = own - parts;
    const u32 share = (whole + p.warps_each - 1) / p.warps_each;
    const u32 batch = share < kInFlight ? share : kInFlight;
    for (u32 number = turn * batch; number < whole; number += p.warps_each * batch) {
      copy_whole<kInFlight>(work, number, whole - number < batch ? whole - number : batch,
                            meanwhile);
    }
  }

  // Returns whether this thread has seen a descriptor that may leave a rest; those of a block have
  // seen all.
  static __device__ bool copy_own(const Params& p, u32 num) {
    Sizes seen{};
    bool has_peeked = false;
    const auto peek = [&] {
      if (has_peeked) return;
      has_peeked = true;
      if (threadIdx.x < num) seen = sizes_of(p, threadIdx.x);
      let_next_kernel_start<kUsePdl>();
    };
    u32 part = 0;
    u32 i = warp_number();
    if (p.warps_each > 1) {
      part = i / p.num_descriptors;
      i -= part * p.num_descriptors;
    }
    for (; i < num && part < p.warps_each; i += gridDim.x * kWarps) {
      copy_own_part(p, read_work(p, i, part == 0 && threadIdx.x % 32 == 0), part, peek);
    }
    peek();
    bool rest = may_leave_rest(p, seen);
#pragma unroll 1
    for (i = threadIdx.x + kThreads; i < num; i += kThreads) {
      rest |= may_leave_rest(p, sizes_of(p, i));
    }
    return rest;
  }

  // -- then: what is left of long ones, by all

  static __device__ u64 rest_units(const Params& p, u32 i) {
    const Work work = read_work(p, i, false);
    return (work.num_segments() - own_segments(p, work) + kUnitSegments - 1) / kUnitSegments;
  }

  // The last of `size` that is not above `value`, of numbers that rise from 0 on; by all lanes.
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

  static __device__ void deal_rests(const Params& p, u32 num) {
    // The number of each descriptor's first unit, in its chunk, and that of all units.
    __shared__ u64 starts[kChunk + 1];
    u64 unit = warp_number();
    for (u32 chunk = 0; chunk < num; chunk += kChunk) {
      const u32 size = num - chunk < kChunk ? num - chunk : kChunk;
      sum_units(p, chunk, size, starts);
      for (; unit < starts[kChunk]; unit += u64(gridDim.x) * kWarps) {
        const u32 found = find_last(starts, size, unit);
        copy_unit(p, read_work(p, chunk + found, false), unit - starts[found]);
      }
      unit -= starts[kChunk];  // its first one of the next chunk
      __syncthreads();         // before the starts are those of the next chunk
    }
  }

  static __device__ void copy_unit(const Params& p, const Work& work, u64 unit) {
    const u32 all = work.num_segments();
    const u64 first = own_segments(p, work) + unit * kUnitSegments;
    if (first >= all) return;  // of a descriptor that was rewritten since
    const u32 begin = static_cast<u32>(first);
    const u32 end = all - begin < kUnitSegments ? all : begin + kUnitSegments;
    if (work.num_whole == 0) {
      for (u32 at = begin; at < end; ++at) copy_parts<1>(p, work, at, at + 1, [] {});
    } else {
      for (u32 at = begin; at < end; at += kInFlight) {
        copy_whole<kInFlight>(work, at - work.num_parts,
                              end - at < kInFlight ? end - at : kInFlight, [] {});
      }
    }
  }

  // Of the lanes up to this one. Rolled up, the kernel fits its registers.
  static __device__ u64 sum_of_lanes(u64 sum) {
#pragma unroll 1
    for (u32 step = 1; step < 32; step *= 2) {
      const u64 other = __shfl_up_sync(kAllLanes, sum, step);
      if (threadIdx.x % 32 >= step) sum += other;
    }
    return sum;
  }

  // Fills `starts`; by all threads of the block.
  static __device__ void sum_units(const Params& p, u32 chunk, u32 size, u64* starts) {
    __shared__ u64 warp_sums[kWarps];
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    u64 total = 0;
    for (u32 begin = 0; begin < size; begin += kThreads) {
      const u32 number = begin + threadIdx.x;
      const u64 units = number < size ? rest_units(p, chunk + number) : 0;
      const u64 sum = sum_of_lanes(units);
      if (lane == 31) warp_sums[warp] = sum;
      __syncthreads();
      const u64 warps = sum_of_lanes(lane < kWarps ? warp_sums[lane] : 0);
      const u64 before = __shfl_sync(kAllLanes, warps, static_cast<int>((warp + 31) % 32));
      const u64 start = total + (warp == 0 ? 0 : before) + sum - units;
      total += __shfl_sync(kAllLanes, warps, 31);
      if (number < size) starts[number] = start;
      if (threadIdx.x == 0) starts[kChunk] = total;
      __syncthreads();  // before the sums are those of the next
    }
  }
};

}  // namespace jitkern
