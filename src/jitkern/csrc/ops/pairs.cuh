// Copying rows between host and device memory as pairs (source row, destination row) ask for it.
//
// Over PCIe the number of 128-byte lines and the bytes in flight count, not the number of SMs.
// Lanes start at the line below the host's row, so that 656 bytes cost 6 requests and not 7 (48.7
// against 46.3 GB/s on an H200, copy engine 55.4), and each thread of a large call has kInFlight
// loads in flight before its first store.
#pragma once

#include <jitkern/copy.cuh>

#include "pairs.h"

namespace jitkern {

// Calls `copy(group)` for each share of `num_rows` rows, a batch of a warp at a time; 2^32 batches
// would be terabytes. `last_batch` in device memory is the last one taken, -1: none. Free warps
// take the next, as beside a GEMM one block may start 1 ms after another, and so that batches in
// flight lie close to each other in the order of the rows. Null: equal shares.
template <class Rows, class Copy>
__device__ inline void for_batches(i64 num_rows, u32* last_batch, const Copy& copy) {
  const u32 num_batches = static_cast<u32>((Rows::kShape.num_threads(num_rows) + 31) / 32);
  const bool as_they_come = last_batch != nullptr;
  const auto take = [last_batch] {  // the number of the next batch, in lane 0
    return threadIdx.x % 32 == 0 ? atomicAdd(last_batch, 1u) + 1u : 0u;
  };
  u32 batch = as_they_come ? take() : static_cast<u32>(thread_number() / 32);
  while (true) {
    if (as_they_come) batch = __shfl_sync(0xffffffffu, batch, 0);
    if (batch >= num_batches) return;
    const Rows group(i64(batch) * 32 + threadIdx.x % 32);
    // The next one before the rows, so that the answer comes while they do.
    batch = as_they_come ? take() : batch + gridDim.x * (blockDim.x / 32);
    copy(group);
  }
}

// A lead that puts every offset past the row: nothing of it is copied.
constexpr i32 kNoRow = -(1 << 30);

// Calls use(r, c, offset) for the vectors of a group that lie in its rows; row r begins lead[r]
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
      copy_rows(p, num_pairs, Rows(thread_number()));  // the launch has a thread for each share
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

  // Straight-line loops, one for each step: a branch between two loads would make the second wait
  // for the first, which costs half of the bandwidth here.
  static __device__ void copy_rows(const Params& p, i64 num_pairs, const Rows group) {
    const char* source[Rows::kRows];
    char* target[Rows::kRows];
    i32 lead[Rows::kRows];  // bytes of a neighbour before the row, in its first line
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const Pair pair = read_pair(p, num_pairs, group.first_row + r);
      const bool inside = pair.is_inside(p);
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

  // A loop over the places with few registers, so that the vectors do not spill.
  static __device__ void store_everywhere(
      const Params& p, const Rows& group, char* const (&target)[Rows::kRows],
      const i32 (&lead)[Rows::kRows], const Vec<kVecBytes> (&value)[Rows::kRows][Rows::kChunks]) {
    char* to[Rows::kRows];
    u32 are_inside = 0;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      to[r] = target[r] - lead[r] + group.first_offset;
    }
    for_vectors<kRowBytes>(group, lead,
                           [&](int r, int c, i32) { are_inside |= 1u << (r * Rows::kChunks + c); });
#pragma unroll 1
    for (u32 t = 0; t < p.num_shifts; ++t) {
      const i64 shift = p.shifts[t];
#pragma unroll
      for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < Rows::kChunks; ++c) {
          const i32 step = group.offset(c) - group.first_offset;  // known to the compiler
          if (are_inside >> (r * Rows::kChunks + c) & 1) {
            store_vec<kVecBytes>(to[r] + shift + step, value[r][c]);
          }
        }
      }
    }
  }

  // Once for each pair: its entry in the slot map, or its fault. Reads the pair again (from L1): no
  // register was kept for it.
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
    const i64 row =
        p.slot_rows == nullptr ? pair.src_row : i64(static_cast<const Int*>(p.slot_rows)[number]);
    if (row < 0) return;
    if (p.slot_map_bytes == 4) {
      static_cast<i32*>(p.slot_map)[row] = static_cast<i32>(pair.dst_row);
    } else {
      static_cast<i64*>(p.slot_map)[row] = pair.dst_row;
    }
  }
};

// Small calls of h2d_gather are one launch over the pairs. Large ones are sorted first: one launch
// fetches each source row once, another copies the repeats in device memory, 80 times as fast.
template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using H2DGather = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes, kLineAligned,
                           kLarge, kInFlight, kHostSource>;

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using D2HScatter = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes,
                            kLineAligned, kLarge, kInFlight, kHostTarget>;

}  // namespace jitkern
