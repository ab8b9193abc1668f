// swap_rows on exact buffers.
// 50 row sizes to a program.
#include "ops/swap.cu"

#include "pairs.h"

namespace emulate {

// Bits of Specialisation::variant.
enum Variant { kLineAligned = 1, kSmallCall = 2 };

constexpr int in_flight(int variant) {
  return variant & kSmallCall ? PAIRS_SMALL_IN_FLIGHT : SWAP_LARGE_IN_FLIGHT;
}

constexpr Config config(int variant) { return variant & kSmallCall ? kSmallConfig : kLargeConfig; }

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kVariant>
void add(Specialisations<SwapParams>& list) {
  using Kernel = SwapRows<kRowBytes, config(kVariant).num_threads, config(kVariant).max_occupancy,
                          kVecBytes, kIndexBytes, bool(kVariant & kLineAligned),
                          !(kVariant & kSmallCall), in_flight(kVariant)>;
  list.push_back({kRowBytes, kVecBytes, kIndexBytes, kVariant, Kernel::kNumThreads, Kernel::run});
}

// Index type, alignment and size of the call take turns.
template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<SwapParams>& list) {
  constexpr int kIndex = index_bytes_in_turn(kRowBytes);
  constexpr int kOther = 12 - kIndex;
  constexpr int kAligned = kRowBytes % 3 == 0 ? kLineAligned : 0;
  add<kRowBytes, kVecBytes, kIndex, kAligned>(list);
  add<kRowBytes, kVecBytes, kOther, (kLineAligned - kAligned) | kSmallCall>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add<kRowBytes, kVecBytes, kOther, (kLineAligned - kAligned)>(list);
    add<kRowBytes, kVecBytes, kIndex, kAligned | kSmallCall>(list);
  }
}
EMULATE_COLLECT(SwapParams, kernels)

void one_run(const Specialisation<SwapParams>& kernel, int run, Random& random) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const bool line_aligned = kernel.variant & kLineAligned;
  const bool small_call = kernel.variant & kSmallCall;
  const i64 window = window_bytes(row_bytes, vec_bytes, line_aligned);
  const int vecs = swap_in_flight(window, vec_bytes, in_flight(kernel.variant));
  const GroupShape shape = group_shape(window, vec_bytes, vecs);
  // Where the lanes of a warp wait for each other, blocks are small.
  const unsigned num_threads =
      !line_aligned && shape.splits == 1 ? 64 : std::min(kernel.num_threads, 256);
  const i64 count = any_num_rows(shape, num_threads, random);
  const i64 host_rows = 2 * count + random.below(count + 1);
  const i64 slots = count + random.below(count + 2);
  IntBuffer triples("triples", any_triples(count, host_rows, slots, kernel.index_bytes, random),
                    kernel.index_bytes);

  Placement host_at = any_placement(row_bytes, vec_bytes, random);
  const Placement gpu_at = any_placement(row_bytes, vec_bytes, random);
  host_at.offset = offset_of_run(kernel, run);
  if (line_aligned) host_at = on_lines(host_at);
  RowBuffer host("host", host_rows, row_bytes, host_at, random);
  RowBuffer gpu("gpu", slots, row_bytes, gpu_at, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  expect_swaps(triples, host, gpu, fault);
  const SwapParams params = swap_params(triples, host, gpu, fault);
  const unsigned blocks = ceil_div(shape.num_threads(count), num_threads);
  run_kernel(kernel, {small_call ? blocks : std::min(blocks, 1 + unsigned(run) % 2)}, num_threads,
             random, params);
  check_all(host, gpu, triples, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("swap", collect(SweepRows()), runs_at_every_offset<SwapParams>, one_run);
}
