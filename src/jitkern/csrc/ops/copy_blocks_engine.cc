// copy_blocks by the copy engine: few copies for runs of blocks.
#include <algorithm>

#include "copy_blocks_host.h"
#include "host/pinned.h"

namespace jitkern {

namespace {

// Neighbouring pairs whose blocks follow each other on both sides.
struct Run {
  i64 src_block;
  i64 dst_block;
  i64 num_blocks;

  bool takes(const Pair& pair) const {
    return num_blocks > 0 && pair.src_row == src_block + num_blocks &&
           pair.dst_row == dst_block + num_blocks;
  }
};

}  // namespace

void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs) {
  const Blocks* host = call.host_side();
  const bool one_registration = host == nullptr || is_one_registration(host->as_row(), kPinCure);
  const BlockStrides& dst = call.dst.strides;
  const BlockStrides& src = call.src.strides;
  // A run is one copy where blocks of a layer touch, which makes its rows longer, or where there
  // is one layer, of which each block is a row. A pitch is not negative.
  const bool blocks_touch =
      dst.block_bytes == call.piece_bytes && src.block_bytes == call.piece_bytes;
  const bool blocks_are_rows = call.num_layers == 1 && dst.block_bytes >= call.piece_bytes &&
                               src.block_bytes >= call.piece_bytes;
  const bool layers_are_rows = call.num_layers == 1 || (dst.layer_bytes >= call.piece_bytes &&
                                                        src.layer_bytes >= call.piece_bytes);
  CopyBatch batch(scope, call.kind());
  const auto queue = [&](const Run& run) {
    if (run.num_blocks == 0) return;
    Copy2D copy{call.dst_piece(run.dst_block),
                call.src_piece(run.src_block),
                dst.layer_bytes,
                src.layer_bytes,
                call.piece_bytes,
                call.num_layers};
    if (blocks_touch) {
      copy.width *= run.num_blocks;
    } else if (blocks_are_rows) {
      copy.dst_pitch = dst.block_bytes;
      copy.src_pitch = src.block_bytes;
      copy.height = run.num_blocks;
    }
    if (layers_are_rows) return batch.add(copy, one_registration);
    // Layers that lie backwards, or whose blocks are expanded: piece by piece.
    for (i64 layer = 0; layer < call.num_layers; ++layer) {
      Copy2D piece = copy;
      piece.dst += layer * dst.layer_bytes;
      piece.src += layer * src.layer_bytes;
      piece.height = 1;
      batch.add(piece, one_registration);
    }
  };
  // Layers of a source may overlap; a row is no longer than its pitch.
  i64 longest_run = blocks_touch || blocks_are_rows ? call.num_pairs : 1;
  if (blocks_touch && call.num_layers > 1 && layers_are_rows) {
    longest_run = std::min(dst.layer_bytes, src.layer_bytes) / call.piece_bytes;
  }
  Run run{};
  for (const Pair& pair : pairs) {
    if (run.num_blocks < longest_run && run.takes(pair)) {
      ++run.num_blocks;
      continue;
    }
    queue(run);
    run = {pair.src_row, pair.dst_row, 1};
  }
  queue(run);
  batch.flush();
}

}  // namespace jitkern
