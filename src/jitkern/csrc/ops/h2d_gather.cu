// h2d_gather on the device: rows of pinned host memory are read over PCIe by a few persistent blocks.
//
// What bounds it is the number of 128-byte lines asked for and the bytes in flight, not the number
// of SMs: lanes start at the line below the row, so that a row of 656 bytes costs 6 requests and not
// 7 (48.7 against 46.3 GB/s on an H200 where the copy engine moves 55.4), and in large calls every
// thread has kGatherInFlight loads in flight before its first store.
#include <jitkern/copy.cuh>
#include <jitkern/fault.cuh>

#include "h2d_gather.h"

namespace jitkern {

// kInFlight: vectors in flight per thread, kGatherInFlight or kSmallInFlight.
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, bool kLineAligned, int kInFlight,
          int kThreads, int kMaxOccupancy>
struct H2DGather {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  using Params = GatherParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr i64 kWindowBytes = window_bytes(kRowBytes, kVecBytes, kLineAligned);
  using Rows = Group<kWindowBytes, kVecBytes, kGatherMaxChunks, kInFlight>;

  static __device__ void run(const Params& p) {
    const i64 num_threads = Rows::kShape.num_threads(p.num_pairs);
    const i64 step = i64(gridDim.x) * blockDim.x;
    for (i64 thread = thread_number(); thread < num_threads; thread += step) {
      copy_rows(p, Rows(thread));
    }
  }

 private:
  // Straight-line loops, one for each step: a branch between two loads would make the second wait
  // for the first, which costs half of the bandwidth here.
  static __device__ void copy_rows(const Params& p, const Rows group) {
    const Int* pairs = static_cast<const Int*>(p.pairs);
    Int src_row[Rows::kRows];
    Int dst_row[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 pair = group.first_row + r;
      src_row[r] = pair < p.num_pairs ? pairs[2 * pair] : -1;
      dst_row[r] = pair < p.num_pairs ? pairs[2 * pair + 1] : -1;
    }
    Vec<kVecBytes> value[Rows::kRows][Rows::kChunks];
    i32 lead[Rows::kRows];  // bytes of a neighbour in front of the row, in its first line
    bool inside[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      inside[r] = src_row[r] >= 0 && dst_row[r] >= 0 && src_row[r] < p.num_src_rows &&
                  dst_row[r] < p.num_dst_rows;
      const char* row = p.src + (inside[r] ? src_row[r] * p.src_stride_bytes : 0);
      lead[r] = kLineAligned ? 0 : static_cast<i32>(address_of(row) % kHostLineBytes);
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - lead[r];
        if (inside[r] && offset >= 0 && offset < kRowBytes) {
          value[r][c] = load_vec<kVecBytes>(row + offset);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      char* row = p.dst + (inside[r] ? dst_row[r] * p.dst_stride_bytes : 0);
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - lead[r];
        if (inside[r] && offset >= 0 && offset < kRowBytes) {
          store_vec<kVecBytes>(row + offset, value[r][c]);
        }
      }
    }
    if (!group.reports()) return;
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      finish_pair(p, group.first_row + r, src_row[r], dst_row[r]);
    }
  }

  static __device__ u64 address_of(const char* pointer) { return reinterpret_cast<u64>(pointer); }

  // Once for each pair: its entry in the slot map, or its fault.
  static __device__ void finish_pair(const Params& p, i64 pair, i64 src_row, i64 dst_row) {
    if (src_row < 0 || dst_row < 0) return;  // padding
    if (src_row >= p.num_src_rows) {
      report_fault(p.fault, FaultSite::kH2dGatherSrc, pair, src_row, p.num_src_rows);
    } else if (dst_row >= p.num_dst_rows) {
      report_fault(p.fault, FaultSite::kH2dGatherDst, pair, dst_row, p.num_dst_rows);
    } else if (p.slot_map != nullptr && p.slot_map_bytes == 4) {
      static_cast<i32*>(p.slot_map)[src_row] = static_cast<i32>(dst_row);
    } else if (p.slot_map != nullptr) {
      static_cast<i64*>(p.slot_map)[src_row] = dst_row;
    }
  }
};

}  // namespace jitkern
