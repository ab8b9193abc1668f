// The copies between host and device memory, h2d_gather and d2h_scatter, on exact buffers.
// 50 row sizes to a program.
#include "ops/pairs.cuh"

#include "pairs.h"

namespace emulate {

// Bits of Specialisation::variant.
enum Variant { kScatter = 1, kLineAligned = 2, kSmallCall = 4, kBatches = 8 };

// A warp reads several pairs at once, as in peer_gather.
struct BatchParams : PairCopyParams {
  u32 batch_pairs;
  static constexpr bool kHasBatches = true;
};

constexpr int in_flight(int variant) {
  return variant & kSmallCall ? PAIRS_SMALL_IN_FLIGHT
         : variant & kScatter ? D2H_SCATTER_LARGE_IN_FLIGHT
                              : H2D_GATHER_LARGE_IN_FLIGHT;
}

constexpr Config config(int variant) { return variant & kSmallCall ? kSmallConfig : kLargeConfig; }

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kVariant>
void add(Specialisations<BatchParams>& list) {
  constexpr auto kSide = kVariant & kScatter ? kHostTarget : kHostSource;
  using Params = std::conditional_t<bool(kVariant & kBatches), BatchParams, PairCopyParams>;
  using Kernel = PairCopy<kRowBytes, config(kVariant).num_threads, config(kVariant).max_occupancy,
                          kVecBytes, kIndexBytes, bool(kVariant & kLineAligned),
                          !(kVariant & kSmallCall), in_flight(kVariant), kSide, Params>;
  const auto run = [](const BatchParams& params) { Kernel::run(params); };
  list.push_back({kRowBytes, kVecBytes, kIndexBytes, kVariant, Kernel::kNumThreads, run});
}

// Every row size is gathered and scattered; index type, alignment and size of the call take turns.
template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<BatchParams>& list) {
  constexpr int kIndex = index_bytes_in_turn(kRowBytes);
  constexpr int kOther = 12 - kIndex;
  constexpr int kAligned = kRowBytes % 3 == 0 ? kLineAligned : 0;
  constexpr int kSmall = kRowBytes % 5 == 0 ? kSmallCall : 0;
  add<kRowBytes, kVecBytes, kIndex, kSmall>(list);
  add<kRowBytes, kVecBytes, kOther, kScatter | kAligned | kSmall>(list);
  if constexpr (kRowBytes >= 256) add<kRowBytes, kVecBytes, kIndex, kBatches>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add<kRowBytes, kVecBytes, kOther, kLineAligned>(list);
    add<kRowBytes, kVecBytes, kOther, (kSmallCall - kSmall)>(list);
    add<kRowBytes, kVecBytes, kIndex, kScatter | (kLineAligned - kAligned)>(list);
  }
}
EMULATE_COLLECT(BatchParams, kernels)

void one_run(const Specialisation<BatchParams>& kernel, int run, Random& random) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const bool scatter = kernel.variant & kScatter;
  const bool line_aligned = kernel.variant & kLineAligned;
  const bool small_call = kernel.variant & kSmallCall;
  // Either many small blocks, or one or two full ones that go round several times, in equal shares
  // or as each warp comes free.
  const bool shares = !small_call && random.below(6) == 0;
  const unsigned num_threads = shares ? 64 : std::min(kernel.num_threads, 256);
  const GroupShape shape = group_shape(window_bytes(row_bytes, vec_bytes, line_aligned), vec_bytes,
                                       in_flight(kernel.variant));
  const i64 num_pairs = any_num_rows(shape, num_threads, random);
  const i64 src_rows = random.pick({i64(1), num_pairs, 2 * num_pairs});
  const i64 dst_rows = num_pairs + random.below(num_pairs + 2);

  IntBuffer pairs("pairs", any_pairs(num_pairs, src_rows, dst_rows, kernel.index_bytes, random),
                  kernel.index_bytes);

  Placement src_at = any_placement(row_bytes, vec_bytes, random);
  Placement dst_at = any_placement(row_bytes, vec_bytes, random);
  (scatter ? dst_at : src_at).offset = offset_of_run(kernel, run);
  if (line_aligned) (scatter ? dst_at : src_at) = on_lines(scatter ? dst_at : src_at);
  if (random.below(8) == 0) src_at.stride_bytes = 0;  // an expanded row
  RowBuffer src("src", src_rows, row_bytes, src_at, random);
  RowBuffer dst("dst", dst_rows, row_bytes, dst_at, random);

  // The number of pairs may be known on the device only; the argument is then of no meaning.
  const bool counted = random.below(2) == 0;
  IntBuffer count("last_pair", {num_pairs - 1}, 4);
  IntBuffer next_batch("last_batch", {-1}, 4);
  const int map_bytes = random.pick({0, 4, 8});
  IntBuffer slot_map("slot_map", std::vector<i64>(src_rows, -7), map_bytes == 4 ? 4 : 8);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_pairs; ++i) {
    const i64 source = pairs.at(2 * i);
    const i64 target = pairs.at(2 * i + 1);
    if (!expect_pair(fault, i, source, target, src_rows, dst_rows)) continue;
    std::memcpy(dst.expected(target), src.row(source), row_bytes);
    if (map_bytes != 0) slot_map.expect(source, target);
  }
  BatchParams params{pair_params(dst, src, pairs, fault), random.pick({u32(shape.rows), 17u, 32u})};
  params.last_pair = counted ? count.words() : nullptr;
  params.last_batch = shares ? next_batch.words() : nullptr;
  params.slot_map = map_bytes == 0 ? nullptr : slot_map.data();
  if (counted) params.num_pairs *= 3;
  params.slot_map_bytes = map_bytes;
  const unsigned blocks = ceil_div(shape.num_threads(num_pairs), num_threads);
  const Rewriter rewriter(pairs, {src_rows, dst_rows});
  run_kernel(kernel, {small_call ? blocks : std::min(blocks, 1 + unsigned(run) % 2)}, num_threads,
             random, params);
  check_all(dst, src, pairs, slot_map, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("pair_copy", collect(SweepRows()), runs_at_every_offset<BatchParams>, one_run);
}
