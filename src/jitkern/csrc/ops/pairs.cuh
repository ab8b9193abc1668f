// Copying rows between host and device memory as pairs (source row, destination row) ask for it.
//
// Over PCIe what counts is the number of 128-byte lines asked for and the bytes in flight, not the
// number of SMs: lanes start at the line below the row on the host's side, so that a row of 656
// bytes costs 6 requests and not 7 (48.7 against 46.3 GB/s on an H200 where the copy engine moves
// 55.4), and in large calls every thread has kInFlight loads in flight before its first store.
#pragma once

#include "batches.cuh"
#include "pairs.h"

namespace jitkern {

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
  // A lead that puts every offset behind the row: nothing of it is copied.
  static constexpr i32 kNoRow = -(1 << 30);

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
    i32 lead[Rows::kRows];  // bytes of a neighbour in front of the row, in its first line
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
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - lead[r];
        if (offset >= 0 && offset < kRowBytes) {
          value[r][c] = load_vec<kVecBytes>(source[r] + offset);
        }
      }
    }
    if constexpr (Params::kHasShifts) {
      store_everywhere(p, group, target, lead, value);
    } else {
#pragma unroll
      for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < Rows::kChunks; ++c) {
          const i32 offset = group.offset(c) - lead[r];
          if (offset >= 0 && offset < kRowBytes) {
            store_vec<kVecBytes>(target[r] + offset, value[r][c]);
          }
        }
      }
    }
    if (!group.reports()) return;
#pragma unroll 1
    for (int r = 0; r < Rows::kRows; ++r) finish_pair(p, num_pairs, group.first_row + r);
  }

  // A loop over the places, and so few registers as it takes not to spill the vectors.
  static __device__ void store_everywhere(
      const Params& p, const Rows& group, char* const (&target)[Rows::kRows],
      const i32 (&lead)[Rows::kRows], const Vec<kVecBytes> (&value)[Rows::kRows][Rows::kChunks]) {
    char* to[Rows::kRows];
    u32 are_inside = 0;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      to[r] = target[r] - lead[r] + group.first_offset;
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - lead[r];
        if (offset >= 0 && offset < kRowBytes) are_inside |= 1u << (r * Rows::kChunks + c);
      }
    }
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

  // Once for each pair: its entry in the slot map, or its fault. Reads the pair again (from L1),
  // for which no register was kept while the row was in flight.
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

}  // namespace jitkern
