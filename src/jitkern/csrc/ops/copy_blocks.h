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
  i64 piece_bytes;  // a block in this layer
};

struct BlockSide {
  const BufferEntry* table;  // in device memory, one per layer; null: layers are layer_bytes apart
  BufferEntry first;
  i64 layer_bytes;
  i64 row_stride;  // between the rows of a block
  i64 num_blocks;
  u32 num_parts;
};

// Flags that signal the arrival of layers.
struct LayerFlags {
  u32* flags;     // in pinned host memory; null: no signals
  u32* num_past;  // in device memory: warps that are past a flag's layers; 0 between calls
  u32 value;      // written to a flag
  u32 num_flags;
};

struct CopyBlocksParams {
  BlockSide dst;
  BlockSide src;
  const void* pairs;       // [num_pairs, 2]: source block, destination block
  const void* dst_blocks;  // destinations, if `pairs` has sources only; else null
  const void* count;       // in device memory: only the first `count` pairs are copied; null: all
  u32 num_pairs;
  u32 num_layers;
  u32 num_rows;      // rows per block in one layer
  u32 num_segments;  // segments per row: see segments_of
  i64 row_bytes;     // 0: piece_bytes of the source's entries
  i32 count_bytes;   // 4 or 8
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;
  LayerFlags signals;  // if it has flags, layers are copied in order
};

// The most pairs on the host that travel in the kernel's parameters (4 KiB): an upload before the
// launch takes 10 us.
constexpr i64 kInlinePairs = 448;
struct InlineBlocksParams : CopyBlocksParams {
  i32 inline_pairs[2 * kInlinePairs];
};
static_assert(sizeof(InlineBlocksParams) <= 4096, "the limit of every driver");

// A segment: one vector per lane of a warp.
constexpr int kWarpLanes = 32;
constexpr i64 kMostSegments = i64(1) << 31;  // a call copies at most 1 TiB, by 16-byte vectors
JITKERN_HOST_DEVICE constexpr int segment_bytes(int vec_bytes) { return kWarpLanes * vec_bytes; }

// The number of segments of a row that begins up to `max_lead` bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 segments_of(i64 row_bytes, i64 max_lead, int vec_bytes) {
  return (max_lead + row_bytes + segment_bytes(vec_bytes) - 1) / segment_bytes(vec_bytes);
}

}  // namespace jitkern
