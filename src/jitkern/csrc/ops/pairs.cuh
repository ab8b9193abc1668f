// Copies rows between host and device memory by pairs (source row, destination row).
//
// The speed over PCIe depends on the number of 128-byte lines and on the bytes in flight, not on
// the number of SMs. Lanes start at the line in which the host row begins: 656 bytes take 6
// requests instead of 7 (48.7 GB/s instead of 46.3 on an H200; copy engine 55.4). In large calls
// each thread issues up to kInFlight loads before its first store.
#pragma once

#include <jitkern/copy.cuh>

#include "pairs.h"

namespace jitkern {

// Calls `copy(group)` for all groups of `num_rows` rows. A warp takes one batch of 32 lanes at a
// time. There must be fewer than 2^32 batches; a 3-byte row takes up to two. `last_batch`, in
// device memory, is the number of the last batch taken (-1: none), and a free warp takes the next:
// beside a GEMM a block may start 1 ms late, and batches in flight stay close in row order. Null:
// each warp has an equal share.
template <class Rows, class Copy>
__device__ inline void for_batches(i64 num_rows, u32* last_batch, const Copy& copy) {
  const u32 num_batches = static_cast<u32>((Rows::kShape.num_threads(num_rows) + 31) / 32);
  const bool is_dynamic = last_batch != nullptr;
  const auto take = [last_batch] {
    return threadIdx.x % 32 == 0 ? atomicAdd(last_batch, 1u) + 1u : 0u;
  };
  u32 batch = is_dynamic ? take() : static_cast<u32>(thread_number() / 32);
  while (true) {
    if (is_dynamic) batch = __shfl_sync(0xffffffffu, batch, 0);
    if (batch >= num_batches) return;
    const Rows group(i64(batch) * 32 + threadIdx.x % 32);
    // The next batch is taken before the copy, which hides the latency of the atomic.
    batch = is_dynamic ? take() : batch + gridDim.x * (blockDim.x / 32);
    copy(group);
  }
}

// A lead for which every offset is past the row: nothing is copied.
constexpr i32 kNoRow = -(1 << 30);

// Calls use(r, c, offset) for each vector of the group that is inside its row. Row r begins lead[r]
// bytes into its first line.
template <i64 kRowBytes, class Rows, class Use>
__device__ inline void for_vectors(const Rows group, const i32 (&lead)[Rows::kRows],
                                   const Use& use) {
#pragma unroll
  for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
    for (int c = 0; c < Rows::kChunks; ++c) {
      const i32 offset = group.offset(c) - lead[r];
      if (offset >= 0 && offset < kRowBytes) use(r, c, offset);
    }
  }
}

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight, HostSide kHostSide,
          class ParamsOf = PairCopyParams>
struct PairCopy {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  static_assert(kRowBytes < (1 << 30), "a row of less than 1 GiB");
  static_assert(kThreads % 32 == 0, "whole warps, which take batches");
  using Params = ParamsOf;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  using Rows = Group<window_bytes(kRowBytes, kVecBytes, kLineAligned), kVecBytes, kInFlight>;

  static __device__ void run(const Params& p) {
    const i64 num_pairs = p.last_pair == nullptr ? p.num_pairs : i64(*p.last_pair + 1u);
    if constexpr (kLarge) {
      for_batches<Rows>(num_pairs, p.last_batch,
                        [&p, num_pairs](const Rows group) { copy_rows(p, num_pairs, group); });
    } else {
      copy_rows(p, num_pairs, Rows(thread_number()));  // the grid covers all rows
    }
  }

 private:
  struct Pair {
    i64 src_row;
    i64 dst_row;

    __device__ bool is_padding() const { return src_row < 0 || dst_row < 0; }
    __device__ bool is_inside(const Params& p) const {
      return !is_padding() && src_row < p.num_src_rows && dst_row < p.num_dst_rows;
    }
  };

  static __device__ Pair read_pair(const Params& p, i64 num_pairs, i64 number) {
    if (number >= num_pairs) return {-1, -1};
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    return {pair[0], pair[1]};
  }

  // One loop per step: with a branch between two loads the second waits for the first, which halves
  // the bandwidth.
  static __device__ void copy_rows(const Params& p, i64 num_pairs, const Rows group) {
    const char* source[Rows::kRows];
    char* target[Rows::kRows];
    i32 lead[Rows::kRows];  // bytes from the start of its first line to the row
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const Pair pair = read_pair(p, num_pairs, group.first_row + r);
      bool inside = pair.is_inside(p);
      if constexpr (Params::kHasShifts) inside = inside && p.has_pair(group.first_row + r);
      source[r] = p.src + (inside ? pair.src_row * p.src_stride_bytes : 0);
      target[r] = p.dst + (inside ? pair.dst_row * p.dst_stride_bytes : 0);
      const char* host = kHostSide == kHostTarget ? target[r] : source[r];
      lead[r] = kLineAligned ? 0 : static_cast<i32>(reinterpret_cast<u64>(host) % kHostLineBytes);
      if (!inside) lead[r] = kNoRow;
    }
    Vec<kVecBytes> value[Rows::kRows][Rows::kChunks];
    for_vectors<kRowBytes>(group, lead, [&](int r, int c, i32 offset) {
      value[r][c] = load_vec<kVecBytes>(source[r] + offset);
    });
    if constexpr (Params::kHasShifts) {
      store_everywhere(p, group, target, lead, value);
    } else {
      for_vectors<kRowBytes>(group, lead, [&](int r, int c, i32 offset) {
        store_vec<kVecBytes>(target[r] + offset, value[r][c]);
      });
    }
    if (!group.reports()) return;
#pragma unroll 1
    for (int r = 0; r < Rows::kRows; ++r) finish_pair(p, num_pairs, group.first_row + r);
  }

  // Stores the rows at all destinations. The loop uses few registers, so the vectors do not spill.
  static __device__ void store_everywhere(
      const Params& p, const Rows& group, char* const (&target)[Rows::kRows],
      const i32 (&lead)[Rows::kRows], const Vec<kVecBytes> (&value)[Rows::kRows][Rows::kChunks]) {
    char* to[Rows::kRows];
    u32 inside_mask = 0;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      to[r] = target[r] - lead[r] + group.first_offset;
    }
    for_vectors<kRowBytes>(
        group, lead, [&](int r, int c, i32) { inside_mask |= 1u << (r * Rows::kChunks + c); });
#pragma unroll 1
    for (u32 t = 0; t < p.num_shifts; ++t) {
      const i64 shift = p.shifts[t];
#pragma unroll
      for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < Rows::kChunks; ++c) {
          const i32 step = group.offset(c) - group.first_offset;  // a compile-time constant
          if (inside_mask >> (r * Rows::kChunks + c) & 1) {
            store_vec<kVecBytes>(to[r] + shift + step, value[r][c]);
          }
        }
      }
    }
  }

  // Sets the pair's entry in the slot map, or reports its fault. Reads the pair again, from L1, to
  // save registers.
  static __device__ void finish_pair(const Params& p, i64 num_pairs, i64 number) {
    const Pair pair = read_pair(p, num_pairs, number);
    if (pair.is_padding()) return;
    if (!pair.is_inside(p)) {
      const bool is_src = pair.src_row >= p.num_src_rows;
      report_fault(p.fault, is_src ? p.src_site : p.dst_site, number,
                   is_src ? pair.src_row : pair.dst_row, is_src ? p.num_src_rows : p.num_dst_rows);
      return;
    }
    if (p.slot_map == nullptr) return;
    if (p.slot_map_bytes == 4) {
      static_cast<i32*>(p.slot_map)[pair.src_row] = static_cast<i32>(pair.dst_row);
    } else {
      static_cast<i64*>(p.slot_map)[pair.src_row] = pair.dst_row;
    }
  }
};

// If a call has the lists of ListParams, one launch fetches each source row once, and another
// copies the repeats within device memory, 20 times as fast (57 MB in 0.055 ms).
template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using H2DGather = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes, kLineAligned,
                           kLarge, kInFlight, kHostSource>;

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using D2HScatter = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes,
                            kLineAligned, kLarge, kInFlight, kHostTarget>;

}  // namespace jitkern
