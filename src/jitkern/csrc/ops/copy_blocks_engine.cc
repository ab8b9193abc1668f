// copy_blocks by the copy engine, also through staging memory on the GPU.
#include <algorithm>

#include "copy_blocks_host.h"
#include "host/copy_2d.h"
#include "host/tuning.h"

namespace jitkern {

namespace {

// Device memory between a cache and pages of the host: 1.2 ms of the link.
constexpr i64 kStagingBytes = i64(64) << 20;
constexpr i64 kDealSms = 4;

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

// One strided copy for each run of pairs.
void copy_tensors(CopyBatch& batch, const BlockCall& call, const std::vector<Pair>& pairs) {
  const Grid& dst = *call.dst.grid;
  const Grid& src = *call.src.grid;
  const i64 bytes = call.max_row_bytes;
  const bool one_registration =
      !call.over_link() || is_one_registration((call.to_host() ? dst : src).whole(), kPinCure);
  // A run is one copy if blocks of a layer touch (its rows are longer then) or if there is one
  // layer (each block is a row).
  const auto touch = [&call, bytes](const Grid& side) {
    return side.inner_stride == bytes &&
           (call.num_layers == 1 || side.outer_stride >= side.inner * bytes);
  };
  const bool blocks_touch = touch(dst) && touch(src);
  const bool blocks_are_rows =
      call.num_layers == 1 && dst.inner_stride >= bytes && src.inner_stride >= bytes;
  const bool layers_are_rows =
      call.num_layers == 1 || (dst.outer_stride >= bytes && src.outer_stride >= bytes);
  const auto queue = [&](const Run& run) {
    if (run.num_blocks == 0) return;
    Copy2D copy{dst.row(0, run.dst_block),
                src.row(0, run.src_block),
                dst.outer_stride,
                src.outer_stride,
                bytes,
                call.num_layers};
    if (blocks_touch) {
      copy.width *= run.num_blocks;
    } else if (blocks_are_rows) {
      copy.dst_pitch = dst.inner_stride;
      copy.src_pitch = src.inner_stride;
      copy.height = run.num_blocks;
    }
    if (layers_are_rows) return batch.add(copy, one_registration);
    // Layers that overlap, or are expanded: piece by piece.
    for (i64 layer = 0; layer < call.num_layers; ++layer) {
      Copy2D piece = copy;
      piece.dst += layer * dst.outer_stride;
      piece.src += layer * src.outer_stride;
      piece.height = 1;
      batch.add(piece, one_registration);
    }
  };
  const i64 longest_run = blocks_touch || blocks_are_rows ? call.pairs.size() : 1;
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
}

// With lists: a copy for each piece, or for a run whose blocks touch on both sides.
void copy_lists(CopyBatch& batch, const BlockCall& call, const std::vector<Pair>& pairs) {
  for (i64 layer = 0; layer < call.num_layers; ++layer) {
    const BufferEntry from = call.src.entry(layer), to = call.dst.entry(layer);
    bool whole = true;  // may be copied at once
    for (const Side* side : {&call.src, &call.dst}) {
      if (side->on_cuda()) continue;
      whole &= side->list ? side->list->is_one_registration(layer)
                          : is_one_registration(side->grid->whole(), kPinCure);
    }
    const i64 bytes = call.row_bytes(layer);
    const bool touch = call.num_rows == 1 && call.src.num_parts() == 1 &&
                       call.dst.num_parts() == 1 && from.block_bytes == bytes &&
                       to.block_bytes == bytes;
    for (size_t i = 0; i < pairs.size();) {
      Run run{pairs[i].src_row, pairs[i].dst_row, 1};
      while (++i < pairs.size() && touch && run.takes(pairs[i])) ++run.num_blocks;
      batch.add({call.dst.piece(to, run.dst_block), call.src.piece(from, run.src_block),
                 call.dst.row_stride, call.src.row_stride, bytes * run.num_blocks, call.num_rows},
                whole);
    }
  }
}

}  // namespace

void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs) {
  CopyBatch batch(scope, !call.over_link() ? CopyKind::kD2D
                         : call.to_host()  ? CopyKind::kD2H
                                           : CopyKind::kH2D);
  call.of_tensors() ? copy_tensors(batch, call, pairs) : copy_lists(batch, call, pairs);
  batch.flush();
}

bool is_for_engine(const LaunchScope& scope, const BlockCall& call) {
  const Figure most = call.to_host() ? kSmPieceBytesToHost : kSmPieceBytes;
  return call.over_link() && call.beside_compute() && call.signals == nullptr &&
         call.max_row_bytes > figure(scope.device.ordinal, most) &&
         call.max_row_bytes >= kMinBatchBytes && CopyBatch::can_batch(scope);
}

bool is_for_staging(const LaunchScope& scope, const BlockCall& call) {
  const Side& host = call.to_host() ? call.dst : call.src;
  return call.over_link() && call.of_tensors() && call.beside_compute() &&
         call.signals == nullptr && host.grid->outer_stride == call.max_row_bytes &&
         call.block_bytes >= kMinBatchBytes && call.block_bytes <= kStagingBytes &&
         CopyBatch::can_batch(scope);
}

void copy_blocks_by_staging(const LaunchScope& scope, const BlockCall& call,
                            const std::vector<Pair>& pairs) {
  const i64 block_bytes = call.block_bytes;
  const auto count = static_cast<i64>(pairs.size());
  const i64 at_once = std::min(count, kStagingBytes / block_bytes);
  const auto memory = allocate_bytes(at_once * block_bytes, call.on_gpu().device());
  BlockCall pieces = call;
  pieces.num_sms = kDealSms;
  Side& staged = call.to_host() ? pieces.dst : pieces.src;
  staged.grid = *call.on_gpu().grid;
  staged.grid->data = static_cast<char*>(memory.data_ptr());
  staged.grid->inner = at_once;
  staged.grid->outer_stride = call.max_row_bytes;
  staged.grid->inner_stride = block_bytes;
  BlockCall pages = call;
  (call.to_host() ? pages.src : pages.dst).grid = staged.grid;
  pages.max_row_bytes = block_bytes;
  pages.num_layers = 1;
  for (i64 begin = 0; begin < count; begin += at_once) {
    std::vector<Pair> to_staging, from_staging;
    for (i64 i = begin; i < std::min(count, begin + at_once); ++i) {
      to_staging.push_back({pairs[i].src_row, i - begin});
      from_staging.push_back({i - begin, pairs[i].dst_row});
    }
    if (call.to_host()) {
      copy_blocks_by_sms(scope, pieces, &to_staging);
      copy_blocks_by_engine(scope, pages, from_staging);
    } else {
      copy_blocks_by_engine(scope, pages, to_staging);
      copy_blocks_by_sms(scope, pieces, &from_staging);
    }
  }
}

}  // namespace jitkern
