// The store kernel on exact buffers.
// 100 row sizes to a program.
#include "ops/store.cu"

#include "sweep.h"

namespace emulate {

constexpr FaultSite kIndicesSite{3};

// The variant is the size of the rows that come first.
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kFirstRowBytes = kRowBytes>
void add(Specialisations<StoreParams>& list) {
  using Kernel =
      StoreKernel<kRowBytes, STORE_CONFIG, kVecBytes, kIndexBytes, STORE_IN_FLIGHT, kFirstRowBytes>;
  list.push_back(
      {kRowBytes, kVecBytes, kIndexBytes, kFirstRowBytes, Kernel::kNumThreads, Kernel::run});
}

template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<StoreParams>& list) {
  constexpr int kIndexBytes = index_bytes_in_turn(kRowBytes);
  add<kRowBytes, kVecBytes, kIndexBytes>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add<kRowBytes, kVecBytes, 12 - kIndexBytes>(list);
    constexpr int kTwoThirds = kRowBytes / kVecBytes * 2 / 3 * kVecBytes;
    if constexpr (kTwoThirds > 0) add<kRowBytes, kVecBytes, kIndexBytes, kTwoThirds>(list);
    if constexpr (kTwoThirds > kVecBytes) add<kRowBytes, kVecBytes, kIndexBytes, kVecBytes>(list);
  }
}
EMULATE_COLLECT(StoreParams, kernels)

void one_run(const Specialisation<StoreParams>& kernel, int run, Random& random) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  // K, which comes first, and V; or one cache alone.
  const i64 k_bytes = kernel.variant;
  const unsigned num_copies = k_bytes == row_bytes && random.below(4) == 0 ? 1 : 2;
  const bool two_sizes = k_bytes != row_bytes;
  const auto shape_of = [&](i64 bytes) { return group_shape(bytes, vec_bytes, STORE_IN_FLIGHT); };
  const GroupShape shape = shape_of(row_bytes);
  const i64 num_rows = any_num_rows(shape, kernel.num_threads, random);
  const i64 num_slots = num_rows + random.below(num_rows + 2);

  std::vector<i64> slots = random.distinct(num_rows, num_slots);
  spoil(slots, num_slots, kernel.index_bytes, random);
  IntBuffer indices("indices", slots, kernel.index_bytes);

  // K and V take turns in one buffer, as in a cache of shape [slots, 2, row].
  Placement at = any_placement(row_bytes, vec_bytes, random);
  at.offset = offset_of_run(kernel, run);
  const bool interleaved = random.below(2) == 0;
  RowBuffer caches("caches", 2 * num_slots, row_bytes, at, random);
  const auto cache_row = [&](int copy, i64 slot) {
    return interleaved ? 2 * slot + copy : copy * num_slots + slot;
  };
  const auto place = [&](bool expanded) {
    Placement rows = any_placement(row_bytes, vec_bytes, random);
    if (expanded) rows.stride_bytes = 0;
    return rows;
  };
  const Placement k_at = place(random.below(8) == 0);
  const Placement v_at = place(false);
  RowBuffer k("k", num_rows, k_bytes, k_at, random);
  RowBuffer v("v", num_rows, row_bytes, v_at, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_rows; ++i) {
    if (indices.at(i) >= num_slots) {
      fault.expect(kIndicesSite, i, indices.at(i), num_slots);
    } else if (indices.at(i) >= 0) {
      std::memcpy(caches.expected(cache_row(0, indices.at(i))), k.row(i), k_bytes);
      if (num_copies == 1) continue;
      std::memcpy(caches.expected(cache_row(1, indices.at(i))), v.row(i), row_bytes);
    }
  }
  const i64 cache_stride = interleaved ? 2 * at.stride_bytes : at.stride_bytes;
  const auto blocks = [&](i64 bytes) -> unsigned {
    return ceil_div(shape_of(bytes).num_threads(num_rows), kernel.num_threads);
  };
  const unsigned k_blocks = two_sizes ? blocks(k_bytes) : 0;
  const StoreParams params{
      {{caches.row(cache_row(0, 0)), k.row(0), cache_stride, k_at.stride_bytes},
       {caches.row(cache_row(1, 0)), v.row(0), cache_stride, v_at.stride_bytes}},
      indices.data(),
      num_rows,
      num_slots,
      k_blocks,
      kIndicesSite,
      fault.record()};
  const unsigned y = two_sizes ? 1 : num_copies;
  const Rewriter rewriter(indices, {num_slots});
  run_kernel(kernel, {k_blocks + blocks(row_bytes), y}, kernel.num_threads, random, params);
  check_all(caches, k, v, indices, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("store", collect(SweepRows()), runs_at_every_offset<StoreParams>, one_run);
}
