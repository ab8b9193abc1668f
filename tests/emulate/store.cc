// The store kernel on exact buffers.
// 100 row sizes to a program.
#include "ops/store.cu"

#include "sweep.h"

namespace emulate {

constexpr FaultSite kIndicesSite{3};

// The variant is the size of the rows that come first, or kPages and the size of a head.
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kFirstRowBytes = kRowBytes>
void add(Specialisations<StoreParams>& list) {
  using Kernel =
      StoreKernel<kRowBytes, STORE_CONFIG, kVecBytes, kIndexBytes, STORE_IN_FLIGHT, kFirstRowBytes>;
  list.push_back(
      {kRowBytes, kVecBytes, kIndexBytes, kFirstRowBytes, Kernel::kNumThreads, Kernel::run});
}
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, i64 kHeadBytes>
void add_pages(Specialisations<StoreParams>& list) {
  using Kernel = StoreKernel<kRowBytes, STORE_CONFIG, kVecBytes, kIndexBytes, STORE_IN_FLIGHT,
                             kRowBytes, true, kHeadBytes>;
  list.push_back(
      {kRowBytes, kVecBytes, kIndexBytes, kPages + kHeadBytes, Kernel::kNumThreads, Kernel::run});
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
    add_pages<kRowBytes, kVecBytes, kIndexBytes, kRowBytes>(list);
    constexpr i64 kHead = longest_head(kRowBytes, kVecBytes);
    if constexpr (kHead > 0) add_pages<kRowBytes, kVecBytes, 12 - kIndexBytes, kHead>(list);
    if constexpr (kHead > kVecBytes) add_pages<kRowBytes, kVecBytes, kIndexBytes, kVecBytes>(list);
  }
}
EMULATE_COLLECT(StoreParams, kernels)

void one_run(const Specialisation<StoreParams>& kernel, int run, Random& random) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const bool is_paged = kernel.variant > kPages;
  const i64 head_bytes = is_paged ? kernel.variant - kPages : row_bytes;
  // K, which comes first, and V; or one cache alone.
  const i64 k_bytes = is_paged ? row_bytes : kernel.variant;
  const unsigned num_copies = k_bytes == row_bytes && random.below(4) == 0 ? 1 : 2;
  const bool two_sizes = k_bytes != row_bytes;
  const auto shape_of = [&](i64 bytes) { return group_shape(bytes, vec_bytes, STORE_IN_FLIGHT); };
  const GroupShape shape = shape_of(row_bytes);
  const i64 num_rows = any_num_rows(shape, kernel.num_threads, random);
  const i64 least_slots = num_rows + random.below(num_rows + 2);
  const CacheLayout layout =
      CacheLayout::any(least_slots, is_paged, row_bytes / head_bytes, 2, random);
  const i64 num_slots = layout.num_slots();

  std::vector<i64> slots = random.distinct(num_rows, num_slots);
  spoil(slots, num_slots, kernel.index_bytes, random);
  IntBuffer indices("indices", slots, kernel.index_bytes);
  // Of the slots or past the end.
  const i64 skip = random.below(2) == 0 ? -1 : indices.at(random.below(num_rows));

  // Both caches are in one buffer, as in one of shape [slots, 2, row].
  Placement at = any_placement(head_bytes, vec_bytes, random);
  at.offset = offset_of_run(kernel, run);
  RowBuffer caches("caches", layout.size(), head_bytes, at, random);
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
    const i64 slot = indices.at(i);
    if (slot < 0 || slot == skip) continue;
    if (slot >= num_slots) {
      fault.expect(kIndicesSite, i, slot, num_slots);
      continue;
    }
    for (int copy = 0; copy < static_cast<int>(num_copies); ++copy) {
      const char* row = copy == 0 ? k.row(i) : v.row(i);
      for (i64 head = 0; head < layout.num_heads; ++head) {
        const i64 bytes = is_paged ? head_bytes : copy == 0 ? k_bytes : row_bytes;
        std::memcpy(caches.expected(layout.head(copy, slot, head)), row + head * bytes, bytes);
      }
    }
  }
  const auto blocks = [&](i64 bytes) -> unsigned {
    return ceil_div(shape_of(bytes).num_threads(num_rows), kernel.num_threads);
  };
  const unsigned k_blocks = two_sizes ? blocks(k_bytes) : 0;
  const CacheStrides strides = layout.strides(at.stride_bytes);
  StoreParams params{};
  params.copies[0] = {caches.row(layout.head(0, 0, 0)), k.row(0), strides, k_at.stride_bytes};
  params.copies[1] = {caches.row(layout.head(1, 0, 0)), v.row(0), strides, v_at.stride_bytes};
  params.indices = indices.data();
  params.num_rows = num_rows;
  params.num_slots = num_slots;
  params.skip = skip;
  params.first_blocks = k_blocks;
  params.indices_site = kIndicesSite;
  params.fault = fault.record();
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
