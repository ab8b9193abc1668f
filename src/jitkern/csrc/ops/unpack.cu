// unpack on the device: pieces of any size and alignment, as descriptors ask for them.
//
// Who copies what. A block has a group of descriptors that follow each other, or, where there are
// fewer descriptors than blocks, a share of one. Its first warp reads them and adds up their
// segments; all its warps then take these in turn, so that what a block copies at a time lies
// together: a warp for each descriptor had 8,000 places of memory at work, and half the bandwidth.
// No sum over all descriptors comes in front, which of small ones takes longer than their copy.
// What is too long for one block is only begun: the rest is dealt to all warps of the grid, in
// units, which takes a sum over what is left. Each block finds out by itself whether there is a
// rest, as blocks have no memory that they share: it reads the lengths of all descriptors while its
// own are on their way.
#include <jitkern/pdl.cuh>

#include "unpack.cuh"

namespace jitkern {

template <int kFormat, int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments, u32 kFirstSegments, u32 kUnitSegments>
struct Unpack {
  static_assert(kThreads % 32 == 0 && kThreads >= 64 && kThreads <= 1024, "2 to 32 warps");
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
      const uint2 sizes = static_cast<const uint2*>(p.descriptors)[8 * i + 2];
      return {i64(sizes.x), i64(sizes.y)};
    } else {
      const i64* row = static_cast<const i64*>(p.descriptors) + kFormat * i;
      return {row[2], kFormat == kSextuples ? row[3] : 1};
    }
  }

  static __device__ Pieces pieces_of(const Params& p, u64 i) {
    if constexpr (kFormat == kStructs) {
      const auto* vectors = static_cast<const uint4*>(p.descriptors) + 4 * i;
      const uint4 offsets = vectors[0], sizes = vectors[1], strides = vectors[2];
      return {
          joined(offsets.x, offsets.y), joined(offsets.z, offsets.w), i64(sizes.x), i64(sizes.y),
          joined(strides.x, strides.y), joined(strides.z, strides.w)};
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

  // -- first: a group of descriptors by each block

  // How many of its segments its own block copies: all parts of a single piece are among them.
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

  // What a block has at hand: descriptors with the number of the first segment of each.
  struct Group {
    Work works[32];
    u32 starts[32];
    u32 total;
  };

  // By the first warp.
  static __device__ void read_group(const Params& p, u32 begin, u32 size, bool reports,
                                    Group& group) {
    const u32 lane = threadIdx.x % 32;
    const Work work = lane < size ? read_work(p, begin + lane, reports) : Work{};
    const u32 own = own_segments(p, work);
    u32 sum = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    group.works[lane] = work;
    group.starts[lane] = sum - own;
    if (lane == 31) group.total = sum;
  }

  // Share `share` of `num_shares` of the group's segments; by all warps of the block. Few are
  // spread over all, of many each warp has as many as it can at a time.
  static __device__ void copy_group(const Params& p, const Group& group, u32 share,
                                    u32 num_shares) {
    const u32 start = group.starts[threadIdx.x % 32];
    const u32 total = group.total;
    const u32 workers = kWarps * num_shares;
    const u32 each = (total + workers - 1) / workers;
    const u32 batch = each < kInFlight ? each : kInFlight;
    for (u32 at = (share * kWarps + threadIdx.x / 32) * batch; at < total; at += workers * batch) {
      const u32 end = total - at < batch ? total : at + batch;
      for (u32 next = at; next < end;) {  // of one or several descriptors
        const u32 found = 31 - __clz(__ballot_sync(kAllLanes, start <= next));
        const Work& work = group.works[found];
        const u32 first = next - group.starts[found];
        const u32 own = (found < 31 ? group.starts[found + 1] : total) - group.starts[found];
        const u32 left = own - first < end - next ? own - first : end - next;
        copy_segments(p, work, first, first + left);
        next += left;
      }
    }
  }

  // Segments [begin, end), kInFlight at most.
  static __device__ void copy_segments(const Params& p, const Work& work, u32 begin, u32 end) {
    u32 at = begin;
    while (at < work.num_parts && at < end) {
      const u32 parts = end < work.num_parts ? end : work.num_parts;
      const u32 next = parts - at < kPartsInFlight ? parts : at + kPartsInFlight;
      copy_parts<kPartsInFlight>(p, work, at, next);
      at = next;
    }
    if (at < end) copy_whole<kInFlight>(work, at - work.num_parts, end - at);
  }

  // Returns whether this thread has seen a descriptor that may leave a rest; those of a block have
  // seen all.
  static __device__ bool copy_own(const Params& p, u32 num) {
    __shared__ Group group;
    const u32 team = blockIdx.x / p.blocks_each;
    const u32 share = blockIdx.x - team * p.blocks_each;
    const u32 first = team * p.group_size;
    const u32 last = first + p.group_size < num ? first + p.group_size : num;
    bool rest = false;
    for (u32 begin = first; begin == first || begin < last; begin += 32) {
      const u32 size = begin < last ? (last - begin < 32 ? last - begin : 32) : 0;
      if (threadIdx.x < 32) {
        read_group(p, begin, size, share == 0, group);
      } else if (begin == first) {
        rest = see_all(p, num);
      }
      __syncthreads();
      if (begin == first) let_next_kernel_start<kUsePdl>();
      copy_group(p, group, share, p.blocks_each);
      __syncthreads();  // before the group is the next one
    }
    return rest;
  }

  // By all warps but the first.
  static __device__ bool see_all(const Params& p, u32 num) {
    bool rest = false;
    for (u32 i = threadIdx.x - 32; i < num; i += kThreads - 32) {
      rest |= may_leave_rest(p, sizes_of(p, i));
    }
    return rest;
  }

  // -- then: what is left of long ones, by all

  // Neighbours are on different SMs.
  static __device__ u32 warp_number() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

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
    for (u32 at = begin; at < end; at += kInFlight) {
      copy_segments(p, work, at, end - at < kInFlight ? end : at + kInFlight);
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
