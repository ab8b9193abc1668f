// copy_blocks on exact buffers: every vector width, index type and direction, pieces of many sizes,
// layouts, alignments and counts.
#include "ops/copy_blocks.cu"

#include "pairs.h"

namespace emulate {

using jitkern::BlockStrides;
using jitkern::CopyBlocksParams;
using jitkern::HostSide;
using jitkern::kHostSource;
using jitkern::kHostTarget;

constexpr Config kConfig{COPY_BLOCKS_CONFIG};

// A kernel whose pairs are in its parameters.
template <class Kernel>
void run_inline(const CopyBlocksParams& p) {
  jitkern::InlineBlocksParams params;
  static_cast<CopyBlocksParams&>(params) = p;
  std::memcpy(params.inline_pairs, p.pairs, static_cast<size_t>(8 * p.num_pairs));
  params.pairs = nullptr;
  Kernel::run(params);
}

template <int kVecBytes, int kIndexBytes, HostSide kLinesOf>
void add(Specialisations<CopyBlocksParams>& list) {
  constexpr int kInFlight =
      kLinesOf == kHostTarget ? COPY_BLOCKS_WRITE_IN_FLIGHT : COPY_BLOCKS_READ_IN_FLIGHT;
  using Kernel = jitkern::CopyBlocks<kVecBytes, kIndexBytes, kConfig.num_threads,
                                     kConfig.max_occupancy, kInFlight, kLinesOf>;
  if constexpr (kIndexBytes == 0) {
    list.push_back({0, kVecBytes, 4, kLinesOf, Kernel::kNumThreads, run_inline<Kernel>});
  } else {
    list.push_back({0, kVecBytes, kIndexBytes, kLinesOf, Kernel::kNumThreads, Kernel::run});
  }
}
template <int... kVecs>
void add_all(Specialisations<CopyBlocksParams>& list) {
  (add<kVecs, 0, kHostSource>(list), ...);
  (add<kVecs, 0, kHostTarget>(list), ...);
  (add<kVecs, 4, kHostSource>(list), ...);
  (add<kVecs, 8, kHostSource>(list), ...);
  (add<kVecs, 4, kHostTarget>(list), ...);
  (add<kVecs, 8, kHostTarget>(list), ...);
}

// Pieces as rows of a buffer, blocks or layers first, with some that are of no block or layer.
struct Layout : Placement {
  i64 num_blocks;
  i64 num_layers;
  bool block_first;
  i64 spare;  // pieces behind each row of pieces

  Layout(i64 num_blocks, i64 num_layers, i64 piece_bytes, int vec_bytes, Random& random)
      : Placement{random.below(128 / vec_bytes) * vec_bytes,
                  piece_bytes + random.pick({0, 0, 1, 3}) * vec_bytes},
        num_blocks(num_blocks),
        num_layers(num_layers),
        block_first(random.below(2) == 0),
        spare(random.below(3)) {}

  i64 row_pieces() const { return (block_first ? num_layers : num_blocks) + spare; }
  i64 num_pieces() const { return (block_first ? num_blocks : num_layers) * row_pieces(); }
  i64 piece(i64 block, i64 layer) const {
    return block_first ? block * row_pieces() + layer : layer * row_pieces() + block;
  }
  BlockStrides strides() const {
    const i64 row_bytes = row_pieces() * stride_bytes;
    return block_first ? BlockStrides{stride_bytes, row_bytes}
                       : BlockStrides{row_bytes, stride_bytes};
  }
};

i64 any_piece_bytes(int vec_bytes, Random& random) {
  const i64 segment = jitkern::segment_bytes(vec_bytes);
  const i64 around = random.pick({i64(0), i64(1), i64(2), i64(5), i64(9)}) * segment;
  return std::max<i64>(vec_bytes, around + (random.below(9) - 4) * vec_bytes);
}

void one_run(const Specialisation<CopyBlocksParams>& kernel, int, Random& random) {
  const int vec_bytes = kernel.vec_bytes;
  const i64 piece_bytes = any_piece_bytes(vec_bytes, random);
  const i64 num_layers = random.pick({1, 1, 2, 5});
  const i64 num_pairs = random.pick({1, 2, 7, 20});
  const i64 src_blocks = random.pick({i64(1), num_pairs, 2 * num_pairs});
  const i64 dst_blocks = num_pairs + random.below(num_pairs + 2);

  IntBuffer pairs("pairs", any_pairs(num_pairs, src_blocks, dst_blocks, kernel.index_bytes, random),
                  kernel.index_bytes);
  const int count_bytes = random.pick({0, 0, 4, 8});
  const i64 count = random.pick({i64(-3), i64(0), num_pairs / 2, num_pairs, num_pairs + 5});
  const IntBuffer counted("count", {count}, count_bytes == 4 ? 4 : 8);
  const i64 last = count_bytes == 0 ? num_pairs : std::min(std::max<i64>(count, 0), num_pairs);

  Layout src_at(src_blocks, num_layers, piece_bytes, vec_bytes, random);
  Layout dst_at(dst_blocks, num_layers, piece_bytes, vec_bytes, random);
  // As the host has it: all pieces at one place of their lines on the side that counts, or any.
  Layout& lines_of = kernel.variant == kHostTarget ? dst_at : src_at;
  const bool same_lead = random.below(3) == 0;
  if (same_lead) lines_of.stride_bytes = ceil_div(lines_of.stride_bytes, 128) * i64(128);
  const i64 max_lead = same_lead ? lines_of.offset : 128 - vec_bytes;
  RowBuffer src("src", src_at.num_pieces(), piece_bytes, src_at, random);
  RowBuffer dst("dst", dst_at.num_pieces(), piece_bytes, dst_at, random);
  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < last; ++i) {
    const i64 source = pairs.at(2 * i);
    const i64 target = pairs.at(2 * i + 1);
    if (!expect_pair(fault, i, source, target, src_blocks, dst_blocks)) continue;
    for (i64 layer = 0; layer < num_layers; ++layer) {
      std::memcpy(dst.expected(dst_at.piece(target, layer)), src.row(src_at.piece(source, layer)),
                  piece_bytes);
    }
  }
  CopyBlocksParams params{};
  params.dst = dst.row(0);
  params.src = src.row(0);
  params.dst_strides = dst_at.strides();
  params.src_strides = src_at.strides();
  params.pairs = pairs.data();
  params.count = count_bytes == 0 ? nullptr : counted.data();
  params.count_bytes = count_bytes;
  params.num_pairs = num_pairs;
  params.num_src_blocks = src_blocks;
  params.num_dst_blocks = dst_blocks;
  params.num_layers = num_layers;
  params.piece_bytes = piece_bytes;
  params.num_segments = jitkern::segments_of(piece_bytes, max_lead, vec_bytes);
  params.pace_ns = random.pick({0u, 0u, 200u});
  params.src_site = kSrcSite;
  params.dst_site = kDstSite;
  params.fault = fault.record();
  // One or three small blocks: they go round several times, or some have nothing to do.
  run_kernel(kernel, {random.pick({1u, 3u})}, 64, random, params, true);
  check_all(dst, src, pairs, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  Specialisations<CopyBlocksParams> list;
  add_all<1, 2, 4, 8, 16>(list);
  return sweep(
      "copy_blocks", list, [](const Specialisation<CopyBlocksParams>&) { return 60; }, one_run);
}
