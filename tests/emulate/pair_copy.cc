// The copies between host and device memory, h2d_gather and d2h_scatter, on exact buffers.
// 50 row sizes to a program.
#include "ops/pairs.cuh"

#include "sweep.h"

namespace emulate {

using jitkern::PairCopyParams;

// Bits of Specialisation::variant.
enum Variant { kScatter = 1, kLineAligned = 2, kSmallCall = 4 };

constexpr FaultSite kSrcSite{5};
constexpr FaultSite kDstSite{6};

constexpr int in_flight(int variant) {
  return variant & kSmallCall ? PAIRS_SMALL_IN_FLIGHT
         : variant & kScatter ? D2H_SCATTER_LARGE_IN_FLIGHT
                              : H2D_GATHER_LARGE_IN_FLIGHT;
}

constexpr Config config(int variant) { return variant & kSmallCall ? kSmallConfig : kLargeConfig; }

template <class Kernel>
void add(Specialisations<PairCopyParams>& list, i64 row_bytes, int vec_bytes, int index_bytes,
         int variant) {
  list.push_back({row_bytes, vec_bytes, index_bytes, variant, Kernel::kNumThreads, Kernel::run});
}
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kVariant>
void add_gather(Specialisations<PairCopyParams>& list) {
  using Kernel =
      jitkern::H2DGather<kRowBytes, config(kVariant).num_threads, config(kVariant).max_occupancy,
                         kVecBytes, kIndexBytes, bool(kVariant & kLineAligned),
                         !(kVariant & kSmallCall), in_flight(kVariant)>;
  add<Kernel>(list, kRowBytes, kVecBytes, kIndexBytes, kVariant);
}
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kVariant>
void add_scatter(Specialisations<PairCopyParams>& list) {
  using Kernel =
      jitkern::D2HScatter<kRowBytes, config(kVariant).num_threads, config(kVariant).max_occupancy,
                          kVecBytes, kIndexBytes, bool(kVariant & kLineAligned),
                          !(kVariant & kSmallCall), in_flight(kVariant | kScatter)>;
  add<Kernel>(list, kRowBytes, kVecBytes, kIndexBytes, kVariant | kScatter);
}

// Every row size is gathered and scattered; index type, alignment and size of the call take turns.
template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<PairCopyParams>& list) {
  constexpr int kIndex = index_bytes_in_turn(kRowBytes);
  constexpr int kOther = 12 - kIndex;
  constexpr int kAligned = kRowBytes % 3 == 0 ? kLineAligned : 0;
  constexpr int kSmall = kRowBytes % 5 == 0 ? kSmallCall : 0;
  add_gather<kRowBytes, kVecBytes, kIndex, kSmall>(list);
  add_scatter<kRowBytes, kVecBytes, kOther, kAligned | kSmall>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add_gather<kRowBytes, kVecBytes, kOther, kLineAligned>(list);
    add_gather<kRowBytes, kVecBytes, kOther, (kSmallCall - kSmall)>(list);
    add_scatter<kRowBytes, kVecBytes, kIndex, (kLineAligned - kAligned)>(list);
  }
}
EMULATE_COLLECT(PairCopyParams, kernels)

void one_run(const Specialisation<PairCopyParams>& kernel, int run, Random& random, Tally& tally) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const bool scatter = kernel.variant & kScatter;
  const bool line_aligned = kernel.variant & kLineAligned;
  const bool small_call = kernel.variant & kSmallCall;
  // Either many small blocks, or one or two full ones that go round several times, in equal shares
  // or as each warp comes free.
  const bool shares = !small_call && random.below(6) == 0;
  const unsigned num_threads = shares ? 64 : kernel.num_threads;
  const jitkern::GroupShape shape =
      jitkern::group_shape(jitkern::window_bytes(row_bytes, vec_bytes, line_aligned), vec_bytes,
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
  RowBuffer src("src", src_rows, row_bytes, src_at.stride_bytes, src_at.offset, random);
  RowBuffer dst("dst", dst_rows, row_bytes, dst_at.stride_bytes, dst_at.offset, random);

  // The number of pairs may be known on the device only; the argument is then of no meaning.
  const bool counted = random.below(2) == 0;
  const IntBuffer count("last_pair", {num_pairs - 1}, 4);
  IntBuffer next_batch("last_batch", {-1}, 4);
  // The slot map is told of the source rows of the pairs, or of others, -1 being none.
  const int map_bytes = random.pick({0, 4, 8});
  const bool other_rows = random.below(3) == 0;
  std::vector<i64> rows = random.distinct(num_pairs, 2 * num_pairs);
  for (i64& row : rows) {
    if (random.below(4) == 0) row = -1;
  }
  IntBuffer slot_rows("slot_rows", rows, kernel.index_bytes);
  IntBuffer slot_map("slot_map", std::vector<i64>(other_rows ? 2 * num_pairs : src_rows, -7),
                     map_bytes == 4 ? 4 : 8);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_pairs; ++i) {
    const i64 source = pairs.at(2 * i);
    const i64 target = pairs.at(2 * i + 1);
    if (source < 0 || target < 0) continue;
    if (source >= src_rows) fault.expect(kSrcSite, i, source, src_rows);
    if (target >= dst_rows) fault.expect(kDstSite, i, target, dst_rows);
    if (source >= src_rows || target >= dst_rows) continue;
    std::memcpy(dst.expected(target), src.row(source), row_bytes);
    const i64 slot_row = other_rows ? slot_rows.at(i) : source;
    if (map_bytes != 0 && slot_row >= 0) slot_map.expect(slot_row, target);
  }
  PairCopyParams params{};
  params.dst = dst.row(0);
  params.src = src.row(0);
  params.dst_stride_bytes = dst_at.stride_bytes;
  params.src_stride_bytes = src_at.stride_bytes;
  params.pairs = pairs.data();
  params.last_pair = counted ? static_cast<const u32*>(count.data()) : nullptr;
  params.last_batch = shares ? static_cast<u32*>(next_batch.data()) : nullptr;
  params.slot_map = map_bytes == 0 ? nullptr : slot_map.data();
  params.slot_rows = other_rows ? slot_rows.data() : nullptr;
  params.num_pairs = counted ? 3 * num_pairs : num_pairs;
  params.num_src_rows = src_rows;
  params.num_dst_rows = dst_rows;
  params.slot_map_bytes = map_bytes;
  params.src_site = kSrcSite;
  params.dst_site = kDstSite;
  params.fault = fault.record();
  const unsigned blocks = ceil_div(shape.num_threads(num_pairs), num_threads);
  run_kernel(kernel, {small_call ? blocks : std::min(blocks, 1 + unsigned(run) % 2)}, num_threads,
             random, params, tally, shares);
  dst.check();
  src.check();
  pairs.check();
  slot_rows.check();
  slot_map.check();
  fault.check();
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("pair_copy", collect(SweepRows()), runs_at_every_offset<PairCopyParams>, one_run);
}
