// A checked call of copy_blocks.
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
  u64 end;               // after the highest

  // ValueError unless `block_dim` is 0 or 1, and pieces are contiguous.
  Blocks(const char* op, const char* arg, AnyView value, const char* dim_arg, AnyView block_dim);

  bool empty() const { return num_layers == 0 || num_blocks == 0 || piece_bytes == 0; }
  // ValueError if two pieces of a tensor that is written share bytes.
  void distinct_pieces() const;
  // Whether blocks of one number are the same memory in both.
  bool same_blocks(const Blocks& other) const;
  // ValueError if a piece shares a byte with one of `other`.
  void apart_from(const Blocks& other) const;
  Rows as_row() const { return as_one_row(*this, begin, end); }
};

// Layers become one if each block is one piece on both sides.
struct BlockCall {
  Blocks src;
  Blocks dst;
  Indices pairs;
  CountArg count;
  std::optional<i64> num_sms;
  bool beside_compute = false;  // the default: few SMs, as a model may run beside the call
  i64 num_layers;
  i64 piece_bytes;
  i64 num_pairs;

  BlockCall(AnyView src, AnyView src_dim, AnyView dst, AnyView dst_dim, AnyView pairs,
            AnyView count, AnyView num_sms);

  bool empty() const { return num_pairs == 0 || dst.empty() || src.empty(); }
  const Blocks& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // The side in host memory of a copy with a GPU, or null.
  const Blocks* host_side() const;
  CopyKind kind() const;

  bool is_inside(const Pair& pair) const {
    return is_below(pair.src_row, src.num_blocks) && is_below(pair.dst_row, dst.num_blocks);
  }
  // The pairs on the CPU that count, each read once, as another thread may write them. IndexError
  // for the first that is out of range.
  std::vector<Pair> read_pairs() const;
  char* dst_piece(i64 block) const { return dst.data + block * dst.strides.block_bytes; }
  const char* src_piece(i64 block) const { return src.data + block * src.strides.block_bytes; }
};

}  // namespace jitkern
