// copy_blocks by the copy engine.
#include "copy_blocks_host.h"
#include "host/copy_2d.h"

namespace jitkern {

namespace {

// Whether one copy may cover any part of a layer on this side.
bool is_one_copy(const Side& side, i64 layer) {
  if (side.on_cuda()) return true;
  return side.list ? side.list->is_one_registration(layer)
                   : is_one_registration(side.grid->whole(), kPinCure);
}

}  // namespace

void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs) {
  CopyBatch batch(scope, !call.over_link() ? CopyKind::kD2D
                         : call.to_host()  ? CopyKind::kD2H
                                           : CopyKind::kH2D);
  // The layers of a tensor are the rows of one copy, unless they overlap or are expanded.
  const auto has_distinct_layers = [&call](const Side& side) {
    return side.grid && side.grid->outer_stride >= call.max_row_bytes;
  };
  const bool are_rows_of_layers = has_distinct_layers(call.src) && has_distinct_layers(call.dst);
  const i64 layers_at_once = are_rows_of_layers ? call.num_layers : 1;
  const auto pitch = [layers_at_once](const Side& side) {
    return layers_at_once > 1 ? side.grid->outer_stride : side.row_stride;
  };
  for (i64 layer = 0; layer < call.num_layers; layer += layers_at_once) {
    const BufferEntry from = call.src.entry(layer), to = call.dst.entry(layer);
    const bool whole = is_one_copy(call.src, layer) && is_one_copy(call.dst, layer);
    const i64 bytes = call.row_bytes(layer);
    // Consecutive pairs of consecutive blocks are one copy if blocks are contiguous on both sides
    // (longer rows), or if there is one layer (a row per block).
    const auto are_contiguous = [&](const Side& side, const BufferEntry& entry) {
      return side.num_parts() == 1 && entry.block_bytes == bytes &&
             (layers_at_once == 1 || side.grid->outer_stride >= side.num_blocks() * bytes);
    };
    const bool contiguous =
        call.num_rows == 1 && are_contiguous(call.src, from) && are_contiguous(call.dst, to);
    const bool are_rows = call.of_tensors() && call.num_layers == 1 && from.block_bytes >= bytes &&
                          to.block_bytes >= bytes;
    for (size_t i = 0; i < pairs.size();) {
      const Pair& first = pairs[i];
      i64 run = 1;
      while (++i < pairs.size() && (contiguous || are_rows) &&
             pairs[i].src_row == first.src_row + run && pairs[i].dst_row == first.dst_row + run) {
        ++run;
      }
      Copy2D copy{call.dst.piece(to, first.dst_row),
                  call.src.piece(from, first.src_row),
                  pitch(call.dst),
                  pitch(call.src),
                  bytes,
                  layers_at_once * call.num_rows};
      if (contiguous) {
        copy.width *= run;
      } else if (are_rows) {
        copy.dst_pitch = to.block_bytes;
        copy.src_pitch = from.block_bytes;
        copy.height = run;
      }
      batch.add(copy, whole);
    }
  }
  batch.flush();
}

bool is_for_engine(const LaunchScope& scope, const BlockCall& call) {
  return call.over_link() && call.beside_compute() && call.signals == nullptr &&
         call.max_row_bytes >= kMinBatchBytes && CopyBatch::can_batch(scope);
}

}  // namespace jitkern
