// The checks of copy_blocks.
#include <algorithm>
#include <cmath>
#include <string>

#include "copy_blocks_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "copy_blocks";

std::string shaped(const Tensor& tensor) { return " (shape " + tensor.shape_text() + ")"; }

// Whether two pieces of a tensor with strides a and b share a byte: |i * a + j * b| < bytes for
// some |i| < num_a and |j| < num_b, not both zero.
bool pieces_meet(i64 a, i64 num_a, i64 b, i64 num_b, i64 bytes) {
  if ((num_a > 1 && a < bytes) || (num_b > 1 && b < bytes)) return true;
  if (num_a <= 1 || num_b <= 1) return false;
  // Nearly always all pieces of one dimension lie between two of the other.
  if ((num_a - 1) * a + bytes <= b || (num_b - 1) * b + bytes <= a) return false;
  for (i64 j = 1; j < num_b; ++j) {
    const i64 below = std::min(j * b / a, num_a - 1);  // the nearest i, or the one above
    if (j * b - below * a < bytes) return true;
    if (below + 1 < num_a && (below + 1) * a - j * b < bytes) return true;
  }
  return false;
}

}  // namespace

Blocks::Blocks(const char* op, const char* arg, AnyView value, const char* dim_arg,
               AnyView block_dim_value)
    : Tensor(op, arg, value), data(Tensor::data()) {
  const i64 block_dim = int_arg(op, dim_arg, block_dim_value);
  if (block_dim != 0 && block_dim != 1) {
    raise_value_error(op, dim_arg, std::to_string(block_dim),
                      "0 or 1, the dimension that counts blocks; the other counts layers");
  }
  if (dl->ndim < 2) value_error("shape " + shape_text(), "at least 2 dimensions");
  i64 items = 1;  // of the dimensions to the right of d
  const auto stride = [&](int d) { return dl->strides == nullptr ? items : i64(dl->strides[d]); };
  for (int d = dl->ndim - 1; d >= 2; --d) {
    if (dl->shape[d] > 1 && items > 0 && stride(d) != items) {
      value_error("stride " + std::to_string(stride(d)) + " in dimension " + std::to_string(d) +
                      " of shape " + shape_text(),
                  "contiguous blocks, stride " + std::to_string(items) + "; call .contiguous()");
    }
    items *= dl->shape[d];
  }
  piece_bytes = items * item_bytes();
  i64 strides_of[2];
  for (int d = 1; d >= 0; --d) {
    strides_of[d] = dl->shape[d] > 1 ? stride(d) * item_bytes() : 0;
    items *= dl->shape[d];
  }
  num_blocks = dl->shape[block_dim];
  num_layers = dl->shape[1 - block_dim];
  strides = {strides_of[1 - block_dim], strides_of[block_dim]};
  begin = end = address(data);
  for (int d = 0; d < 2 && !empty(); ++d) {
    const i64 steps = (dl->shape[d] - 1) * strides_of[d];
    (steps < 0 ? begin : end) += static_cast<u64>(steps);
  }
  end += static_cast<u64>(piece_bytes);
}

void Blocks::distinct_pieces() const {
  if (empty() || !pieces_meet(std::abs(strides.layer_bytes), num_layers,
                              std::abs(strides.block_bytes), num_blocks, piece_bytes)) {
    return;
  }
  value_error("blocks of " + std::to_string(piece_bytes) + " bytes a layer that overlap, blocks " +
                  std::to_string(std::abs(strides.block_bytes)) + " and layers " +
                  std::to_string(std::abs(strides.layer_bytes)) + " bytes apart" + shaped(*this),
              "memory of its own for each in a tensor that is written");
}

bool Blocks::same_blocks(const Blocks& other) const {
  return data == other.data && num_blocks == other.num_blocks &&
         strides.layer_bytes == other.strides.layer_bytes &&
         strides.block_bytes == other.strides.block_bytes;
}

void Blocks::apart_from(const Blocks& other) const {
  if (empty() || other.empty() || !(begin < other.end && other.begin < end)) return;
  // Layer by layer: blocks of one may lie between those of the other, as K and V of one tensor.
  const auto rows_of = [](const Blocks& blocks, i64 layer) {
    Rows rows(blocks, 1, blocks.piece_bytes, 0);
    const u64 lowest =
        address(blocks.data) +
        static_cast<u64>(layer * blocks.strides.layer_bytes +
                         std::min<i64>(0, (blocks.num_blocks - 1) * blocks.strides.block_bytes));
    rows.num_rows = blocks.num_blocks;
    rows.stride_bytes = std::abs(blocks.strides.block_bytes);
    rows.begin = lowest;
    rows.end = lowest + static_cast<u64>((rows.num_rows - 1) * rows.stride_bytes) +
               static_cast<u64>(rows.row_bytes);
    return rows;
  };
  for (i64 i = 0; i < num_layers; ++i) {
    const Rows rows = rows_of(*this, i);
    for (i64 j = 0; j < other.num_layers; ++j) rows.apart_from(rows_of(other, j));
  }
}

BlockCall::BlockCall(AnyView src_arg, AnyView src_dim, AnyView dst_arg, AnyView dst_dim,
                     AnyView pairs_arg, AnyView count_arg, AnyView num_sms_value)
    : src(kOp, "src", src_arg, "src_block_dim", src_dim),
      dst(kOp, "dst", dst_arg, "dst_block_dim", dst_dim),
      pairs(kOp, "pairs", pairs_arg),
      num_sms(num_sms_arg(kOp, num_sms_value)),
      num_layers(dst.num_layers),
      piece_bytes(dst.piece_bytes) {
  src.same_dtype(dst);
  if (src.on_cuda() && dst.on_cuda()) src.same_device(dst);
  if (pairs.on_cuda() || !on_gpu().on_cuda()) pairs.same_device(on_gpu());
  require_last_dim(pairs, 2, "source block, destination block");
  num_pairs = pairs.count / 2;
  if (src.num_layers != dst.num_layers) {
    src.value_error(std::to_string(src.num_layers) + " layers" + shaped(src),
                    std::to_string(dst.num_layers) + " as in dst" + shaped(dst));
  }
  if (src.piece_bytes != dst.piece_bytes) {
    src.value_error("blocks of " + std::to_string(src.piece_bytes) + " bytes a layer" + shaped(src),
                    std::to_string(dst.piece_bytes) + " bytes as in dst" + shaped(dst));
  }
  dst.distinct_pieces();
  if (dst.ordinal() == src.ordinal() && !dst.same_blocks(src)) dst.apart_from(src);
  count = CountArg(kOp, count_arg, pairs);
  if (!dst.empty()) {
    const Rows written = dst.as_row();
    pairs.apart_from(written);
    count.apart_from(written);
  }
  // A block that is one piece on both sides is copied as such. The layers' stride goes to 0, as
  // that of `[blocks, bytes]`, one item, would make vectors of one item (18 GB/s, not 50).
  const auto is_one_piece = [](const Blocks& blocks) {
    return blocks.num_layers <= 1 || blocks.strides.layer_bytes == blocks.piece_bytes;
  };
  if (is_one_piece(dst) && is_one_piece(src) && num_layers > 0) {
    piece_bytes *= num_layers;
    num_layers = 1;
    dst.strides.layer_bytes = src.strides.layer_bytes = 0;
  }
}

const Blocks* BlockCall::host_side() const {
  if (dst.on_cuda() && src.on_cuda()) return nullptr;
  return dst.on_cuda() ? &src : &dst;
}

CopyKind BlockCall::kind() const {
  if (dst.on_cuda()) return src.on_cuda() ? CopyKind::kD2D : CopyKind::kH2D;
  return src.on_cuda() ? CopyKind::kD2H : CopyKind::kH2H;
}

std::vector<Pair> BlockCall::read_pairs() const {
  const i64 bound = count.read(num_pairs);
  std::vector<Pair> found;
  found.reserve(static_cast<size_t>(bound));
  pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < bound; ++i) {
      const Pair pair(index_at, i);
      if (is_inside(pair)) {
        found.push_back(pair);
      } else if (!pair.is_padding()) {
        if (pair.src_row >= src.num_blocks) {
          raise_index_error(kOp, "pairs[..., 0]", i, pair.src_row, src.num_blocks);
        }
        raise_index_error(kOp, "pairs[..., 1]", i, pair.dst_row, dst.num_blocks);
      }
    }
  });
  return found;
}

}  // namespace jitkern
