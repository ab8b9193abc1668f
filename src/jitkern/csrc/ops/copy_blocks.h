// Parameters of the kernel of copy_blocks.
#pragma once

#include "pairs.h"

namespace jitkern {

// A side's memory: the piece of block b in layer l begins at l * layer_bytes + b * block_bytes.
struct BlockStrides {
  i64 layer_bytes;
  i64 block_bytes;
};

struct CopyBlocksParams {
  char* dst;
  const char* src;
  BlockStrides dst_strides;
  BlockStrides src_strides;
  const void* pairs;  // [num_pairs, 2]: source block, destination block
  const void* count;  // in device memory: how many of the pairs count; null: all
  i64 num_pairs;
  i64 num_src_blocks;
  i64 num_dst_blocks;
  i64 num_layers;
  i64 piece_bytes;   // of a block in one layer
  i64 num_segments;  // of a piece: see segments_of
  i32 count_bytes;   // 4 or 8
  u32 pace_ns;       // from one batch of a warp to its next, at least; 0: none
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;
};

// Pairs on the host travel in the kernel's parameters (4 KiB): an upload before the launch takes 10
// us of a call.
constexpr i64 kInlinePairs = 448;
struct InlineBlocksParams : CopyBlocksParams {
  i32 inline_pairs[2 * kInlinePairs];
};
static_assert(sizeof(InlineBlocksParams) <= 4096, "what every driver takes");

// A segment is what the lanes of a warp move by one vector each.
constexpr int kWarpLanes = 32;
JITKERN_HOST_DEVICE constexpr int segment_bytes(int vec_bytes) { return kWarpLanes * vec_bytes; }

// Segments of a piece that begins up to `max_lead` bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 segments_of(i64 piece_bytes, i64 max_lead, int vec_bytes) {
  return (max_lead + piece_bytes + segment_bytes(vec_bytes) - 1) / segment_bytes(vec_bytes);
}

}  // namespace jitkern
