// h2d_gather on the device: rows of pinned host memory are read over PCIe by a few persistent blocks.
//
// What bounds it is the number of 128-byte lines asked for and the bytes in flight, not the number
// of SMs: lanes start at the line below the row, so that a row of 656 bytes costs 6 requests and not
// 7 (48.7 against 46.3 GB/s on an H200 where the copy engine moves 55.4), and every thread has
// kGatherUnroll loads in flight before its first store.
#include <jitkern/copy.cuh>
#include <jitkern/fault.cuh>

#include "h2d_gather.h"

namespace jitkern {

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, bool kLineAligned, int kThreads,
          int kMaxOccupancy>
struct H2DGather {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  using Params = GatherParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr i64 kWindowBytes = window_bytes(kRowBytes, kVecBytes, kLineAligned);
  using Rows = FlatRows<kWindowBytes / kVecBytes>;

  static __device__ void run(const Params& p) {
    const i64 num_vecs = p.num_pairs * (kWindowBytes / kVecBytes);
    const i64 step = i64(gridDim.x) * blockDim.x;
    for (i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x; first < num_vecs;
         first += step * kGatherUnroll) {
      Vec<kVecBytes> value[kGatherUnroll];
      char* target[kGatherUnroll];
#pragma unroll
      for (int j = 0; j < kGatherUnroll; ++j) {
        target[j] = nullptr;
        const i64 flat = first + j * step;
        if (flat >= num_vecs) continue;
        const char* source = nullptr;
        locate(p, Rows(flat), source, target[j]);
        if (target[j] != nullptr) value[j] = load_once<kVecBytes>(source);
      }
#pragma unroll
      for (int j = 0; j < kGatherUnroll; ++j) {
        if (target[j] != nullptr) store_once<kVecBytes>(target[j], value[j]);
      }
    }
  }

 private:
  // Where this vector comes from and goes to; `target` stays null if there is nothing to copy.
  static __device__ void locate(const Params& p, Rows at, const char*& source, char*& target) {
    const Int* pair = static_cast<const Int*>(p.pairs) + 2 * at.row;
    const i64 src_row = pair[0];
    const i64 dst_row = pair[1];
    if (src_row < 0 || dst_row < 0) return;  // padding
    const bool once = at.vec == 0;
    if (src_row >= p.num_src_rows) {
      if (once) {
        report_fault(p.fault, FaultSite::kH2dGatherSrc, at.row, src_row, p.num_src_rows);
      }
      return;
    }
    if (dst_row >= p.num_dst_rows) {
      if (once) {
        report_fault(p.fault, FaultSite::kH2dGatherDst, at.row, dst_row, p.num_dst_rows);
      }
      return;
    }
    if (once && p.slot_map != nullptr) {
      if (p.slot_map_bytes == 4) {
        static_cast<i32*>(p.slot_map)[src_row] = static_cast<i32>(dst_row);
      } else {
        static_cast<i64*>(p.slot_map)[src_row] = dst_row;
      }
    }
    const char* row = p.src + src_row * p.src_stride_bytes;
    const i64 lead = kLineAligned ? 0 : reinterpret_cast<u64>(row) % kHostLineBytes;
    const i64 offset = i64(at.vec) * kVecBytes - lead;
    if (offset < 0 || offset >= kRowBytes) return;  // a neighbour's bytes in the shared lines
    source = row + offset;
    target = p.dst + dst_row * p.dst_stride_bytes + offset;
  }
};

}  // namespace jitkern
