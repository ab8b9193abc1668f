// What copy_blocks knows of a call once it is checked, and the ways that its blocks may take.
#pragma once

#include <vector>

#include "copy_blocks.h"
#include "host/copy_2d.h"
#include "pairs_host.h"

namespace jitkern {

// A tensor seen as blocks of bytes, each a contiguous piece in every layer.
struct Blocks : Tensor {
  char* data;
  i64 num_layers;
  i64 num_blocks;
  i64 piece_bytes;
  BlockStrides strides;  // 0 of a dimension of one
  u64 begin;             // address of the lowest byte, unless it is empty
  u64 end;               // behind the highest

  // ValueError unless `block_dim`, argument `dim_arg`, is 0 or 1, and pieces are contiguous.
  Blocks(const char* op, const char* arg, AnyView value, const char* dim_arg, AnyView block_dim);

  bool empty() const { return num_layers == 0 || num_blocks == 0 || piece_bytes == 0; }
  // Of a tensor that is written: ValueError where two of its pieces share bytes.
  void distinct_pieces() const;
  // Whether each block is that of the same number in `other`, of as many layers and bytes.
  bool same_blocks(const Blocks& other) const;
  // ValueError where a piece shares a byte with one of `other`.
  void apart_from(const Blocks& other) const;
  // The memory from the first byte to the last, as one row.
  Rows as_row() const;
};

// A call that is checked. Layers are one where each block is one piece on both sides.
struct BlockCall {
  Blocks src;
  Blocks dst;
  Indices pairs;
  std::optional<Indices> count;
  std::optional<i64> num_sms;
  bool beside_compute = false;  // the caller leaves it to us how much of the GPU is taken
  i64 num_layers;
  i64 piece_bytes;
  i64 num_pairs;

  BlockCall(AnyView src, AnyView src_dim, AnyView dst, AnyView dst_dim, AnyView pairs,
            AnyView count, AnyView num_sms);

  bool empty() const { return num_pairs == 0 || dst.empty() || src.empty(); }
  const Blocks& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // The side in host memory of a copy with a GPU; null where both are on the GPU.
  const Blocks* host_side() const;
  CopyKind kind() const;

  bool is_inside(const Pair& pair) const {
    return is_below(pair.src_row, src.num_blocks) && is_below(pair.dst_row, dst.num_blocks);
  }
  // The pairs on the CPU that are to be copied, each read once: another thread may write them.
  // IndexError for the first that is out of range.
  std::vector<Pair> read_pairs() const;
  char* dst_piece(i64 block) const { return dst.data + block * dst.strides.block_bytes; }
  const char* src_piece(i64 block) const { return src.data + block * src.strides.block_bytes; }
};

// By the copy engine: one strided copy for each run of pairs whose blocks follow each other on both
// sides.
void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs);

}  // namespace jitkern
