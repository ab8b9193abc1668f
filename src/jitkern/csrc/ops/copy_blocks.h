// Parameters of the kernel of copy_blocks.
#pragma once

#include "pairs.h"

namespace jitkern {

// The buffer of one layer. A block is `num_parts` blocks of the other side: block b begins at
// address + b / num_parts * block_bytes + b % num_parts * part_bytes.
struct alignas(16) BufferEntry {
  u64 address;
  i64 block_bytes;
  i64 part_bytes;
  i64 piece_bytes;  // of a block
};

struct BlockSide {
  const BufferEntry* table;  // in device memory, one for each layer; null: layers at one distance
  BufferEntry first;
  i64 layer_bytes;
  i64 row_stride;  // of the rows of a block
  i64 num_blocks;
  u32 num_parts;
};

// Where each layer's arrival is signalled.
struct LayerFlags {
  u32* flags;     // in pinned host memory; null: nowhere
  u32* num_past;  // in device memory: warps that have no more of a flag's layers; 0 between calls
  u32 value;      // what a flag becomes
  u32 num_flags;
};

struct CopyBlocksParams {
  BlockSide dst;
  BlockSide src;
  const void* pairs;       // [num_pairs, 2]: source block, destination block
  const void* dst_blocks;  // the destinations, if `pairs` are sources alone; null: they are not
  const void* count;       // in device memory: how many of the pairs count; null: all
  i64 num_pairs;
  i64 num_layers;
  i64 num_rows;      // of a block in one layer
  i64 row_bytes;     // 0: as the source's entries say
  i64 num_segments;  // of a row: see segments_of
  i32 count_bytes;   // 4 or 8
  u32 pace_ns;       // from one batch of a warp to its next, at least; 0: none
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;
  LayerFlags signals;  // with flags, layers are copied one after the other
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

// Segments of a row that begins up to `max_lead` bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 segments_of(i64 row_bytes, i64 max_lead, int vec_bytes) {
  return (max_lead + row_bytes + segment_bytes(vec_bytes) - 1) / segment_bytes(vec_bytes);
}

}  // namespace jitkern
