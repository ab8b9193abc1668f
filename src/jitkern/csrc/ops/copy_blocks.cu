// copy_blocks on the device: blocks of several layers, piece by piece, as pairs ask for them.
//
// A piece is cut into segments of one vector a lane, from the 128-byte line below it on the side
// kLinesOf (the host's, if there is one), so that no read request is split. A warp loads kInFlight
// segments before it stores the first; neighbouring warps have neighbouring segments.
//
// Stores that fill the link to the host delay all memory traffic of the GPU: beside 2 SMs a decode
// step takes 1.1 to 1.3 times as long, 1.03 to 1.05 if these are paced to 32 GB/s.
#include <jitkern/copy.cuh>

#include "copy_blocks.h"
#include "system_memory.cuh"

namespace jitkern {

template <int kIndexBytes>
struct BlockPairs {
  using Params = CopyBlocksParams;
  using Int = Index<kIndexBytes>;
  static __device__ const Int* of(const Params& p) { return static_cast<const Int*>(p.pairs); }
};
// 0: in the parameters.
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
  static_assert(kInFlight <= kWarpLanes, "a lane works out one segment at most");
  using Pairs = BlockPairs<kIndexBytes>;
  using Params = typename Pairs::Params;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr i64 kSegmentBytes = segment_bytes(kVecBytes);

  static __device__ void run(const Params& p) {
    const u64 pieces = static_cast<u64>(num_pairs(p)) * static_cast<u64>(p.num_layers);
    const u64 num_segments = pieces * static_cast<u64>(p.num_segments);
    // Of kInFlight segments each; the host checks that 32 bits count them.
    const u32 num_batches = static_cast<u32>((num_segments + kInFlight - 1) / kInFlight);
    const u32 num_warps = gridDim.x * (blockDim.x / kWarpLanes);
    u32 batch = static_cast<u32>(thread_number() / kWarpLanes);
    if (batch >= num_batches) return;
    Segment own = segment_of_lane(p, batch, num_segments);
    u32 due_ns = static_cast<u32>(nanoseconds());
    while (batch < num_batches) {
      if (kLinesOf == kHostTarget && p.pace_ns > 0) due_ns = wait_for_turn(due_ns, p.pace_ns);
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

  static __device__ i64 num_pairs(const Params& p) {
    if (p.count == nullptr) return p.num_pairs;
    const i64 count =
        p.count_bytes == 4 ? *static_cast<const i32*>(p.count) : *static_cast<const i64*>(p.count);
    return count < 0 ? 0 : count < p.num_pairs ? count : p.num_pairs;
  }

  // Nearly always by 32 bits, which takes a third of the time.
  static __device__ u64 divide(u64 value, u64 by) {
    if (((value | by) >> 32) == 0) return static_cast<u32>(value) / static_cast<u32>(by);
    return value / by;
  }

  // Each of the first kInFlight lanes works out one segment of the batch.
  static __device__ Segment segment_of_lane(const Params& p, u32 batch, u64 num_segments) {
    const u32 lane = threadIdx.x % kWarpLanes;
    const u64 number = u64(batch) * kInFlight + lane;
    if (lane >= kInFlight || number >= num_segments) return {};
    const u64 piece = divide(number, static_cast<u64>(p.num_segments));
    const u64 pair = divide(piece, static_cast<u64>(p.num_layers));
    const i64 segment = static_cast<i64>(number - piece * static_cast<u64>(p.num_segments));
    const i64 layer = static_cast<i64>(piece - pair * static_cast<u64>(p.num_layers));
    const typename Pairs::Int* blocks = Pairs::of(p) + 2 * pair;
    const i64 src_block = blocks[0];
    const i64 dst_block = blocks[1];
    if (src_block < 0 || dst_block < 0) return {};
    const bool src_inside = src_block < p.num_src_blocks;
    if (!src_inside || dst_block >= p.num_dst_blocks) {
      if (layer == 0 && segment == 0) {
        report_fault(p.fault, src_inside ? p.dst_site : p.src_site, static_cast<i64>(pair),
                     src_inside ? dst_block : src_block,
                     src_inside ? p.num_dst_blocks : p.num_src_blocks);
      }
      return {};
    }
    const auto address = [&](const char* base, const BlockStrides& strides, i64 block) {
      return reinterpret_cast<u64>(base) +
             static_cast<u64>(layer * strides.layer_bytes + block * strides.block_bytes);
    };
    const u64 source = address(p.src, p.src_strides, src_block);
    const u64 target = address(p.dst, p.dst_strides, dst_block);
    const i64 lead = static_cast<i64>((kLinesOf == kHostTarget ? target : source) % kHostLineBytes);
    const i64 at = segment * kSegmentBytes - lead;  // of the segment in the piece
    const i64 left = p.piece_bytes - at;
    if (left <= 0) return {};
    return {source + static_cast<u64>(at), target + static_cast<u64>(at),
            static_cast<u32>(at < 0 ? -at : 0) |
                static_cast<u32>(left < kSegmentBytes ? left : kSegmentBytes) << 16};
  }

  // Straight-line loops: a branch between two loads would make the second wait for the first.
  // Returns this lane's segment of batch `next`, whose pairs it reads while the vectors come.
  static __device__ Segment copy_segments(const Params& p, const Segment& own, u32 next,
                                          u64 num_segments) {
    const u32 offset = threadIdx.x % kWarpLanes * kVecBytes;
    Vec<kVecBytes> value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u64 source = __shfl_sync(0xffffffffu, own.source, i);
      if (is_inside(__shfl_sync(0xffffffffu, own.range, i), offset)) {
        value[i] = load_vec<kVecBytes>(reinterpret_cast<const char*>(source + offset));
      }
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
