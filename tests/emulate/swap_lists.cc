// A large call of swap_rows in the order of the host's memory: its lists, the moves that they ask
// for, and the way of what was fetched from staging to its slots.
#include "ops/sort.cuh"
#include "ops/swap.cu"

#include "lists.h"

namespace emulate {

// Exchanges come first; of these, of the other rows to fetch and of the others to write back to,
// each list is in the order of its regions and without a gap.
void check_moves(const IntBuffer& moves, i64 stride_bytes, int shift) {
  const i64 count = moves.size() / 3;
  const auto fetch = [&](i64 i) { return moves.at(3 * i); };
  const auto back = [&](i64 i) { return moves.at(3 * i + 2); };
  i64 first = 0;
  while (first < count && fetch(first) >= 0 && fetch(first) == back(first)) ++first;
  const auto check_list = [&](const char* name, i64 begin, i64 end, auto row) {
    i64 last_region = -1;
    bool ended = false;
    for (i64 i = begin; i < end; ++i) {
      if (row(i) < 0) {
        ended = true;
        continue;
      }
      const i64 region = row(i) * stride_bytes >> shift;
      if (ended) fail(std::string(name) + " with a gap in front of move " + std::to_string(i));
      if (region < last_region) {
        fail(std::string(name) + " of move " + std::to_string(i) + " out of order");
      }
      last_region = region;
    }
  };
  check_list("exchange", 0, first, fetch);
  check_list("row to fetch", first, count, fetch);
  check_list("row to write back to", first, count, back);
}

template <i64 kRowBytes, int kVecBytes, bool kLineAligned, class Int>
void one_run(Random& random) {
  constexpr int kIndexBytes = sizeof(Int);
  const i64 count = kRowBytes > 1000 ? random.pick({i64(1), i64(9), i64(40)})
                                     : random.pick({i64(1), i64(33), i64(257), i64(400)});
  const i64 host_rows = 2 * count + random.below(3 * count);
  const i64 slots = count + random.below(count + 2);
  IntBuffer triples("triples", any_triples(count, host_rows, slots, kIndexBytes, random),
                    kIndexBytes);
  Placement host_at = any_placement(kRowBytes, kVecBytes, random);
  const Placement gpu_at = any_placement(kRowBytes, kVecBytes, random);
  host_at.offset = 5 * random.below(128) * kVecBytes % 128;
  if (kLineAligned) host_at = on_lines(host_at);
  RowBuffer host("host", host_rows, kRowBytes, host_at, random);
  RowBuffer gpu("gpu", slots, kRowBytes, gpu_at, random);
  RowBuffer staging("staging", count, kRowBytes, kRowBytes, 0, random);
  FaultWord fault(random.pick({0u, 0u, 0u, 1u, 2u}));
  expect_swaps(triples, host, gpu, fault);
  SwapParams swap = swap_params(triples, host, gpu, fault);

  RegionBuffers region_buffers(host_rows * host_at.stride_bytes, kNumMoveKinds, random);
  IntBuffer counters("counters", {-1, -1}, 4);
  IntBuffer ranks("ranks", 2 * count, kUntouched, 4);
  IntBuffer moves("moves", 3 * count, -1, kIndexBytes);
  IntBuffer places("places", 2 * count, -1, kIndexBytes);
  SwapListParams list{swap};
  list.regions = region_buffers.regions(counters.words());
  list.ranks = ranks.words();
  list.moves = moves.data();
  list.places = places.data();
  using List = ListTriples<kIndexBytes, kListConfig.num_threads, 1>;
  using Place = PlaceTriples<kIndexBytes, kListConfig.num_threads, 1>;
  run_list<List>(count, list, random);
  scan(list.regions, random);
  const bool rewritten = random.below(8) == 0;
  if (rewritten) {
    // Another stream writes the triples meanwhile: nothing outside comes to be a move.
    auto* now = static_cast<Int*>(triples.data());
    for (i64 i = 0; i < 3 * count; ++i) {
      const i64 bound = i % 3 == 1 ? slots : host_rows;
      now[i] = static_cast<Int>(random.pick({i64(-5), bound - 1, bound, i64(0)}));
    }
  }
  run_list<Place>(count, list, random);
  fault.check();
  if (rewritten) {
    for (i64 i = 0; i < 3 * count; ++i) {
      if (moves.at(i) >= (i % 3 == 1 ? slots : host_rows)) fail("a move that is outside");
    }
    for (i64 i = 0; i < count; ++i) {
      if (places.at(2 * i) >= count) fail("a place behind the staging");
    }
    return;
  }
  check_moves(moves, host_at.stride_bytes, region_buffers.shift);

  swap.triples = moves.data();
  swap.staging = staging.row(0);
  swap.last_batch = counters.words() + 1;
  using Swap = SwapRows<kRowBytes, kLargeConfig.num_threads, 1, kVecBytes, kIndexBytes,
                        kLineAligned, true, SWAP_LARGE_IN_FLIGHT, true>;
  run_large<Swap>(1 + unsigned(random.below(2)), swap, random, 64);
  for (i64 i = 0; i < count; ++i) {
    if (places.at(2 * i) < 0) continue;
    if (places.at(2 * i) != i) fail("a place of another move");
    std::memcpy(staging.expected(i), gpu.expected(places.at(2 * i + 1)), kRowBytes);
  }
  staging.check();  // holds what the slots shall, and nothing else was written
  host.check();

  const PairCopyParams place = pair_params(gpu, staging, places, fault);
  using PlaceStaged = H2DGather<kRowBytes, kLargeConfig.num_threads, 1, kVecBytes, kIndexBytes,
                                true, true, SWAP_PLACE_IN_FLIGHT>;
  run_large<PlaceStaged>(2, place, random, 64);
  check_all(gpu, host, fault);
}

// Rows of a part of a warp, of one, and of several, each with both index types.
template <i64 kRowBytes, int kVecBytes, bool kLineAligned>
void runs() {
  const std::string name = "swap_lists: rows of " + std::to_string(kRowBytes) +
                           " bytes, line-aligned " + std::to_string(kLineAligned);
  const auto one = [&](Random& random, int run) {
    run % 2 ? one_run<kRowBytes, kVecBytes, kLineAligned, i32>(random)
            : one_run<kRowBytes, kVecBytes, kLineAligned, i64>(random);
  };
  rounds(name, 60, one, kRowBytes * 1000);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  runs<24, 8, false>();
  runs<656, 16, false>();
#ifndef SWEEP_FEW  // what mutants are tried on
  runs<3, 1, false>();
  runs<656, 16, true>();
  runs<1200, 16, false>();
  runs<4096, 16, false>();
  runs<4096, 16, true>();
#endif
}
