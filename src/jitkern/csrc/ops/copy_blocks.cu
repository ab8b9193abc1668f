// copy_blocks on the device: copies blocks in all layers.
//
// A row of a block is cut into segments of one vector per lane. Segments begin at the 128-byte line
// below the row on the side kLinesOf (the host's, if there is one), so that no read request is
// split. A warp loads kInFlight segments before it stores the first. Neighbouring warps copy
// neighbouring segments.
//
// Stores that fill the link to the host delay all memory traffic of the GPU: beside 2 SMs a decode
// step takes 1.1 to 1.3 times as long, beside 1 SM 1.01 to 1.03 (17 to 21 GB/s).
#include <jitkern/copy.cuh>

#include "copy_blocks.h"

namespace jitkern {

template <int kIndexBytes>
struct BlockPairs {
  using Params = CopyBlocksParams;
  using Int = Index<kIndexBytes>;
  static __device__ const Int* of(const Params& p) { return static_cast<const Int*>(p.pairs); }
};
// 0: the pairs are in the parameters.
template <>
struct BlockPairs<0> {
  using Params = InlineBlocksParams;
  using Int = i32;
  static __device__ const Int* of(const Params& p) { return p.inline_pairs; }
};

template <int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy, int kInFlight,
          HostSide kLinesOf>
struct CopyBlocks {
  static_assert(kThreads % kWarpLanes == 0, "whole warps");
  static_assert(kInFlight <= kWarpLanes, "a lane computes one segment at most");
  using Pairs = BlockPairs<kIndexBytes>;
  using Params = typename Pairs::Params;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr i64 kSegmentBytes = segment_bytes(kVecBytes);

  static __device__ void run(const Params& p) {
    // At most kMostSegments: 64-bit divisions took so many registers that a warp had 4 loads in
    // flight instead of 8. A batch is kInFlight segments.
    const u32 num_segments = num_pairs(p) * p.num_layers * p.num_rows * p.num_segments;
    const u32 num_batches = (num_segments + kInFlight - 1) / kInFlight;
    const u32 num_warps = gridDim.x * (blockDim.x / kWarpLanes);
    u32 batch = static_cast<u32>(thread_number() / kWarpLanes);
    u32 num_told = 0;  // flags that count this warp as past
    Segment own = segment_of_lane(p, batch, num_segments);
    while (true) {
      if (p.signals.flags != nullptr) {
        const bool is_last = batch >= num_batches;
        num_told = tell_layers(p.signals, num_told, is_last ? num_segments : batch * kInFlight,
                               num_segments);
      }
      if (batch >= num_batches) return;
      batch = num_batches - batch > num_warps ? batch + num_warps : num_batches;
      own = copy_segments(p, own, batch, num_segments);
    }
  }

 private:
  struct Segment {
    u64 source;  // addresses of its first byte, which may lie before the piece
    u64 target;
    u32 range;  // its bytes in the piece: the first, and the end shifted by 16
  };

  static __device__ u32 num_pairs(const Params& p) {
    if (p.count == nullptr) return p.num_pairs;
    const i64 count =
        p.count_bytes == 4 ? *static_cast<const i32*>(p.count) : *static_cast<const i64*>(p.count);
    return count < 0 ? 0 : count < i64(p.num_pairs) ? static_cast<u32>(count) : p.num_pairs;
  }

  // Counts this warp as past all flags whose layers end at or before `next`, its next segment.
  // The last warp past a flag sets it. Returns how many flags count this warp.
  static __device__ u32 tell_layers(const LayerFlags& signals, u32 num_told, u32 next,
                                    u32 num_segments) {
    const u32 each = num_segments / signals.num_flags;  // all layers have equally many
    if (num_told == signals.num_flags || next < (num_told + 1) * each) return num_told;
    const u32 num_warps = gridDim.x * (blockDim.x / kWarpLanes);
    __syncwarp();
    __threadfence();  // orders this warp's stores before its count
    while (num_told < signals.num_flags && next >= (num_told + 1) * each) {
      if (threadIdx.x % kWarpLanes == 0 &&
          atomicAdd(signals.num_past + num_told, 1u) == num_warps - 1) {
        signals.num_past[num_told] = 0;  // ready for the next call
        __threadfence_system();          // orders all warps' stores before the flag
        *static_cast<volatile u32*>(signals.flags + num_told) = signals.value;
      }
      ++num_told;
    }
    return num_told;
  }

  // Each of the first kInFlight lanes computes one segment of the batch.
  static __device__ Segment segment_of_lane(const Params& p, u32 batch, u32 num_segments) {
    const u32 lane = threadIdx.x % kWarpLanes;
    const u32 number = batch * kInFlight + lane;
    if (lane >= kInFlight || number >= num_segments) return {};
    u32 piece = number / p.num_segments;
    const u32 segment = number - piece * p.num_segments;
    u32 row = 0;
    if (p.num_rows > 1) {
      const u32 rows = piece;
      piece = rows / p.num_rows;
      row = rows - piece * p.num_rows;
    }
    const bool layer_first = p.signals.flags != nullptr;
    const u32 inner = layer_first ? num_pairs(p) : p.num_layers;
    const u32 slow = piece / inner;
    const u32 fast = piece - slow * inner;
    const u32 pair = layer_first ? fast : slow;
    const u32 layer = layer_first ? slow : fast;
    const typename Pairs::Int* const blocks = Pairs::of(p);
    const bool two_vectors = kIndexBytes != 0 && p.dst_blocks != nullptr;
    const i64 src_block = blocks[two_vectors ? pair : 2 * pair];
    const i64 dst_block = two_vectors ? static_cast<const typename Pairs::Int*>(p.dst_blocks)[pair]
                                      : blocks[2 * pair + 1];
    if (src_block < 0 || dst_block < 0) return {};
    const bool src_inside = src_block < p.src.num_blocks;
    if (!src_inside || dst_block >= p.dst.num_blocks) {
      if (layer == 0 && row == 0 && segment == 0) {
        report_fault(p.fault, src_inside ? p.dst_site : p.src_site, static_cast<i64>(pair),
                     src_inside ? dst_block : src_block,
                     src_inside ? p.dst.num_blocks : p.src.num_blocks);
      }
      return {};
    }
    i64 row_bytes = p.row_bytes;
    const u64 source = address_of(p.src, layer, src_block, row, row_bytes);
    const u64 target = address_of(p.dst, layer, dst_block, row, row_bytes);
    const i64 lead = static_cast<i64>((kLinesOf == kHostTarget ? target : source) % kHostLineBytes);
    const i64 at = i64(segment) * kSegmentBytes - lead;  // the segment's place in the row
    const i64 left = row_bytes - at;
    if (left <= 0) return {};
    return {source + static_cast<u64>(at), target + static_cast<u64>(at),
            static_cast<u32>(at < 0 ? -at : 0) |
                static_cast<u32>(left < kSegmentBytes ? left : kSegmentBytes) << 16};
  }

  // Sets `row_bytes` if it is 0.
  static __device__ u64 address_of(const BlockSide& side, u32 layer, i64 block, u32 row,
                                   i64& row_bytes) {
    const BufferEntry* const entry = side.table != nullptr ? side.table + layer : &side.first;
    const u64 layer_bytes =
        side.table != nullptr ? 0 : u64(layer) * static_cast<u64>(side.layer_bytes);
    if (row_bytes == 0) row_bytes = entry->piece_bytes;
    u64 at = entry->address + layer_bytes + u64(row) * static_cast<u64>(side.row_stride);
    if (side.num_parts == 1) return at + static_cast<u64>(block * entry->block_bytes);
    const u32 whole = static_cast<u32>(block) / side.num_parts;
    const u32 part = static_cast<u32>(block) - whole * side.num_parts;
    return at + u64(whole) * static_cast<u64>(entry->block_bytes) +
           u64(part) * static_cast<u64>(entry->part_bytes);
  }

  // Straight-line loops: a branch between two loads would make the second wait for the first. So
  // would shuffles, whose results take the registers of loads: 2 SMs read 27 GB/s of 656-byte rows.
  // Returns this lane's segment of batch `next`, whose pairs it reads while the loads are in
  // flight.
  static __device__ Segment copy_segments(const Params& p, const Segment& own, u32 next,
                                          u32 num_segments) {
    const u32 offset = threadIdx.x % kWarpLanes * kVecBytes;
    const char* source[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u64 from = __shfl_sync(0xffffffffu, own.source, i);
      const bool inside = is_inside(__shfl_sync(0xffffffffu, own.range, i), offset);
      source[i] = inside ? reinterpret_cast<const char*>(from + offset) : nullptr;
    }
    Vec<kVecBytes> value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (source[i] != nullptr) value[i] = load_vec<kVecBytes>(source[i]);
    }
    const Segment following = segment_of_lane(p, next, num_segments);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u64 target = __shfl_sync(0xffffffffu, own.target, i);
      if (is_inside(__shfl_sync(0xffffffffu, own.range, i), offset)) {
        store_vec<kVecBytes>(reinterpret_cast<char*>(target + offset), value[i]);
      }
    }
    return following;
  }

  static __device__ bool is_inside(u32 range, u32 offset) {
    return offset >= (range & 0xffffu) && offset < range >> 16;
  }
};

}  // namespace jitkern
