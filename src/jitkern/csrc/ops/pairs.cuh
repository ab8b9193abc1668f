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

// Calls `copy(batch)` for all batches; a warp takes one at a time. `last_batch`, in device memory,
// is the number of the last batch taken (-1: none), and a free warp takes the next: beside a GEMM a
// block may start 1 ms late, and batches in flight stay close in row order. Null: each warp has an
// equal share.
template <class Copy>
__device__ inline void for_batches(u32 num_batches, u32* last_batch, const Copy& copy) {
  const bool is_dynamic = last_batch != nullptr;
  const auto take = [last_batch] {
    return threadIdx.x % 32 == 0 ? atomicAdd(last_batch, 1u) + 1u : 0u;
  };
  u32 batch = is_dynamic ? take() : static_cast<u32>(thread_number() / 32);
  while (true) {
    if (is_dynamic) batch = __shfl_sync(0xffffffffu, batch, 0);
    if (batch >= num_batches) return;
    const u32 current = batch;
    // The next batch is taken before the copy, which hides the latency of the atomic.
    batch = is_dynamic ? take() : batch + gridDim.x * (blockDim.x / 32);
    copy(current);
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

  // See copy_batch(). A warp copies whole rows of 272 bytes to 4 KiB, one or several in turn.
  static constexpr bool kHasBatches =
      kLarge && Params::kHasBatches && Rows::kShape.lanes == 32 && Rows::kShape.splits == 1;

  static __device__ void run(const Params& p) {
    const i64 num_pairs = p.last_pair == nullptr ? p.num_pairs : i64(*p.last_pair + 1u);
    if constexpr (kHasBatches) {
      const i64 num_batches = (num_pairs + p.batch_pairs - 1) / p.batch_pairs;
      for_batches(static_cast<u32>(num_batches), p.last_batch, [&p, num_pairs](u32 batch) {
        copy_batch(p, num_pairs, i64(batch) * p.batch_pairs);
      });
    } else if constexpr (kLarge) {
      // Fewer than 2^32 batches; a 3-byte row takes up to two.
      const i64 num_batches = (Rows::kShape.num_threads(num_pairs) + 31) / 32;
      for_batches(static_cast<u32>(num_batches), p.last_batch, [&p, num_pairs](u32 batch) {
        copy_group(p, num_pairs, Rows(i64(batch) * 32 + threadIdx.x % 32));
      });
    } else {
      copy_group(p, num_pairs, Rows(thread_number()));  // the grid covers all rows
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

  // The place in p.pairs of the i-th pair to copy; -1: none.
  static __device__ i64 pair_number(const Params& p, i64 i) {
    if constexpr (Params::kHasShifts) return p.pair_number(i);
    return i;
  }

  static __device__ Pair read_pair(const Params& p, i64 num_pairs, i64 i) {
    if (i >= num_pairs) return {-1, -1};
    const i64 number = pair_number(p, i);
    if (Params::kHasShifts && number < 0) return {-1, -1};
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * number;
    return {pair[0], pair[1]};
  }

  // Whether this rank copies the i-th pair.
  static __device__ bool is_copied(const Params& p, i64 i, const Pair pair) {
    if constexpr (Params::kHasShifts) return pair.is_inside(p) && p.has_pair(i);
    return pair.is_inside(p);
  }

  static __device__ void copy_group(const Params& p, i64 num_pairs, const Rows group) {
    Pair pairs[Rows::kRows];
    bool inside[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      pairs[r] = read_pair(p, num_pairs, group.first_row + r);
      inside[r] = is_copied(p, group.first_row + r, pairs[r]);
    }
    copy_rows(p, pairs, inside, group);
    if (!group.reports()) return;
#pragma unroll 1
    for (int r = 0; r < Rows::kRows; ++r) finish_pair(p, num_pairs, group.first_row + r);
  }

  // A warp reads up to 32 pairs at once and copies those that it is to copy, a group at a time.
  static __device__ void copy_batch(const Params& p, i64 num_pairs, i64 first) {
    const u32 lane = threadIdx.x % 32;
    const i64 i = lane < p.batch_pairs ? first + lane : num_pairs;
    const Pair own = read_pair(p, num_pairs, i);
    u32 left = __ballot_sync(0xffffffffu, is_copied(p, i, own));
    while (left != 0) {
      Pair pairs[Rows::kRows];
      bool inside[Rows::kRows];
#pragma unroll
      for (int r = 0; r < Rows::kRows; ++r) {
        inside[r] = left != 0;
        const int from = inside[r] ? __ffs(static_cast<int>(left)) - 1 : 0;
        pairs[r].src_row = __shfl_sync(0xffffffffu, own.src_row, from);
        pairs[r].dst_row = __shfl_sync(0xffffffffu, own.dst_row, from);
        left &= left - 1;
      }
      copy_rows(p, pairs, inside, Rows(lane));
    }
    finish_pair(p, num_pairs, i);
  }

  // One loop per step: with a branch between two loads the second waits for the first, which halves
  // the bandwidth.
  static __device__ void copy_rows(const Params& p, const Pair (&pairs)[Rows::kRows],
                                   const bool (&inside)[Rows::kRows], const Rows group) {
    const char* source[Rows::kRows];
    char* target[Rows::kRows];
    i32 lead[Rows::kRows];  // bytes from the start of its first line to the row
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      source[r] = p.src + (inside[r] ? pairs[r].src_row * p.src_stride_bytes : 0);
      target[r] = p.dst + (inside[r] ? pairs[r].dst_row * p.dst_stride_bytes : 0);
      const char* host = kHostSide == kHostTarget ? target[r] : source[r];
      lead[r] = kLineAligned ? 0 : static_cast<i32>(reinterpret_cast<u64>(host) % kHostLineBytes);
      if (!inside[r]) lead[r] = kNoRow;
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
  static __device__ void finish_pair(const Params& p, i64 num_pairs, i64 i) {
    const Pair pair = read_pair(p, num_pairs, i);
    if (pair.is_padding()) return;
    if (!pair.is_inside(p)) {
      const bool is_src = pair.src_row >= p.num_src_rows;
      report_fault(p.fault, is_src ? p.src_site : p.dst_site, pair_number(p, i),
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
