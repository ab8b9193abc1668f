// Parts of ResidencyMap's kernel: a warp's share of a list, and the fetch of the missing rows.
#pragma once

#include <jitkern/copy.cuh>

#include "cluster.cuh"
#include "residency.h"

namespace jitkern {

constexpr u32 kFullWarp = 0xffffffffu;

// The number of lanes below this one whose bit is set.
__device__ inline i32 rank_in(u32 ballot) {
  return __popc(ballot & ((1u << threadIdx.x % 32) - 1u));
}

// The sum over the lanes of a warp.
__device__ inline i32 warp_sum(i32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return static_cast<i32>(__reduce_add_sync(kFullWarp, static_cast<u32>(value)));
#else
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(kFullWarp, value, bits);
  return value;
#endif
}

// A warp's share of an array, 32 items a step. The first kAhead steps are held in registers.
template <class T, int kAhead>
struct WarpShare {
  const T* items;
  i32 begin;  // a multiple of 32
  i32 end;
  i32 steps;
  T ahead[kAhead];
  u32 marked[kAhead];  // set by mark()

  // `warp` of `num_warps`, which share the array.
  __device__ WarpShare(const T* items, i32 count, i32 warp, i32 num_warps) : items(items) {
    steps = (count + 32 * num_warps - 1) / (32 * num_warps);
    begin = warp * steps * 32;
    end = begin + steps * 32 < count ? begin + steps * 32 : count;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const i32 at = place(step);
      ahead[step] = at < end ? items[at] : T(-1);
    }
  }

  __device__ i32 place(int step) const {
    return begin + step * 32 + static_cast<i32>(threadIdx.x % 32);
  }

  // Calls use(position, item, whether it is inside) in each lane, in whole warps.
  template <class Use>
  __device__ void for_each(const Use& use) const {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (begin + step * 32 < end) use(place(step), ahead[step], place(step) < end);
    }
    for_others(use);
  }

  // Marks the items for which is_it(position, item) holds; returns their number in the warp.
  template <class Is>
  __device__ i32 mark(const Is& is_it) {
    i32 count = 0;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      marked[step] = 0;
      if (begin + step * 32 >= end) continue;
      const bool is = place(step) < end && is_it(place(step), ahead[step]);
      marked[step] = __ballot_sync(kFullWarp, is);
      count += __popc(marked[step]);
    }
    for_others([&](i32 at, T item, bool inside) {
      count += __popc(__ballot_sync(kFullWarp, inside && is_it(at, item)));
    });
    return count;
  }

  // Calls use(position, item, its rank, whether it is marked) for all items. The rank counts marked
  // items before it, from `rank` on.
  template <class Is, class Use>
  __device__ void for_ranks(i32 rank, const Is& is_it, const Use& use) const {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (begin + step * 32 >= end) continue;
      const u32 ballot = marked[step];
      const bool is = ballot >> threadIdx.x % 32 & 1;
      if (place(step) < end) use(place(step), ahead[step], rank + rank_in(ballot), is);
      rank += __popc(ballot);
    }
    for_others([&](i32 at, T item, bool inside) {
      const bool is = inside && is_it(at, item);
      const u32 ballot = __ballot_sync(kFullWarp, is);
      if (inside) use(at, item, rank + rank_in(ballot), is);
      rank += __popc(ballot);
    });
  }

 private:
  template <class Use>
  __device__ void for_others(const Use& use) const {
#pragma unroll 1
    for (i32 first = begin + kAhead * 32; first < end; first += 32) {
      const i32 at = first + static_cast<i32>(threadIdx.x % 32);
      use(at, at < end ? items[at] : T(-1), at < end);
    }
  }
};

// The fetch of the missing rows. A row is cut into segments of one vector per lane, which begin at
// the 128-byte line in which the row begins, so that no read over the link is split. A warp loads
// kInFlight segments before it stores the first.
template <int kVecBytes, int kInFlight>
class Fetch {
 public:
  __device__ Fetch(const ResidencyParams& p, const ResidencyShared& shared, i64 first_row,
                   i32 num_missed, const Cluster& cluster)
      : p_(p),
        shared_(shared),
        first_row_(first_row),
        num_missed_(static_cast<u32>(num_missed)),
        num_segments_(num_missed_ * p.num_layers * p.segments.value),
        step_(cluster.size * (blockDim.x / kWarpLanes) * kInFlight),
        // The last warps begin: the first ones write the state, and would wait for these loads.
        first_(((blockDim.x - 1 - threadIdx.x) / kWarpLanes * cluster.size + cluster.rank) *
               kInFlight) {}

  // Begins the loads of the warp's first segments. Their slots need not be known.
  __device__ void load() {
    if (first_ >= num_segments_) return;
    own_ = segment_of_lane();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const char* const source = from_lane(own_.source, i);
      if (is_inside(from_lane(own_.range, i))) value_[i] = load_vec<kVecBytes>(source + offset());
    }
  }

  // Stores them, then fetches the others.
  __device__ void store_all() {
    while (first_ < num_segments_) {
      char* const target = own_.range == 0 ? nullptr : target_of();
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        char* const at = from_lane(target, i);
        if (is_inside(from_lane(own_.range, i))) store_vec<kVecBytes>(at + offset(), value_[i]);
      }
      first_ += step_;
      load();
    }
  }

 private:
  struct Segment {
    const char* source;  // its first byte, which may lie before the row
    u32 range;           // its bytes in the row: the first, and the end shifted by 16
    u32 row;             // layer * num_missed + number of the miss
    i32 at;              // place of its first byte in the row
  };

  // Each of the first kInFlight lanes computes one segment.
  __device__ Segment segment_of_lane() const {
    const u32 lane = threadIdx.x % kWarpLanes, number = first_ + lane;
    if (lane >= kInFlight || number >= num_segments_) return {};
    const u32 row = p_.segments.quotient(number);
    const u32 layer = layer_of(row);
    const BufferEntry& entry = entry_of(p_.host, layer);
    const i32 host_row = shared_.host_rows[row - layer * num_missed_];
    const char* const source = address_of(p_.host, entry, host_row);
    const i32 lead = static_cast<i32>(reinterpret_cast<u64>(source) % kHostLineBytes);
    const i32 at = static_cast<i32>(number - row * p_.segments.value) * kSegmentBytes - lead;
    const i32 left = static_cast<i32>(entry.piece_bytes) - at;
    if (left <= 0) return {};
    return {source + at,
            static_cast<u32>(at < 0 ? -at : 0) |
                static_cast<u32>(left < kSegmentBytes ? left : kSegmentBytes) << 16,
            row, at};
  }

  __device__ char* target_of() const {
    const u32 layer = layer_of(own_.row);
    const i32 slot = shared_.victims[own_.row - layer * num_missed_];
    return address_of(p_.cache, entry_of(p_.cache, layer), first_row_ + slot) + own_.at;
  }

  __device__ u32 layer_of(u32 row) const { return p_.num_layers == 1 ? 0 : row / num_missed_; }
  static __device__ const BufferEntry& entry_of(const BlockSide& side, u32 layer) {
    return side.table != nullptr ? side.table[layer] : side.first;
  }
  static __device__ char* address_of(const BlockSide& side, const BufferEntry& entry, i64 row) {
    const i64 parts = side.num_parts;
    const i64 offset = parts == 1
                           ? row * entry.block_bytes
                           : row / parts * entry.block_bytes + row % parts * entry.part_bytes;
    return reinterpret_cast<char*>(entry.address) + offset;
  }

  template <class T>
  static __device__ T from_lane(T value, int lane) {
    if constexpr (sizeof(T) == 8) {
      return reinterpret_cast<T>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(value), lane));
    } else {
      return __shfl_sync(kFullWarp, value, lane);
    }
  }
  static __device__ u32 offset() { return threadIdx.x % kWarpLanes * kVecBytes; }
  static __device__ bool is_inside(u32 range) {
    return offset() >= (range & 0xffffu) && offset() < range >> 16;
  }

  static constexpr i32 kSegmentBytes = segment_bytes(kVecBytes);
  const ResidencyParams& p_;
  const ResidencyShared& shared_;
  const i64 first_row_;  // first row of the cache that is the state's
  const u32 num_missed_;
  const u32 num_segments_;
  const u32 step_;
  u32 first_;  // number of the warp's first segment in flight
  Segment own_;
  Vec<kVecBytes> value_[kInFlight];
};

}  // namespace jitkern
