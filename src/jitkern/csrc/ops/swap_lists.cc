// Large calls of swap_rows in the order of the host's memory: lists of moves, the moves, and the
// way of what was fetched from staging to its slots.
#include <algorithm>

#include "swap_host.h"

namespace jitkern {

namespace {

// What a part of a call takes for staging and lists: that of 750,000 rows of 656 bytes, which lie
// as dense as it pays.
constexpr i64 kMaxScratchBytes = i64(512) << 20;

// Entry points of the module of rows in order: see kernel() in ops/swap.py.
enum Entry : int { kSwapStaged, kPlaceStaged };

const LoadedKernels& triple_list_kernels(const Device& device, int index_bytes) {
  static KernelTable table("swap_lists", {"index_bytes"},
                           [](const Spec&, int, int) { return GroupShape{1, 1, 1, 1}; });
  return table.find(device, Spec(index_bytes));
}

// Where a part of as many triples has what in the scratch memory.
struct SwapScratch {
  static constexpr i64 kRegionsBytes = 4 * i64(kNumMoveKinds) * kNumRegions;

  Scratch scratch;
  i64 last_ranks_at, counters_at, moves_at, places_at, ones_bytes, starts_at, ranks_at, staging_at;

  SwapScratch(const SwapCall& call, i64 count) {
    // The first pieces start as all ones.
    last_ranks_at = scratch.add(kRegionsBytes);
    counters_at = scratch.add(4 * 2);
    moves_at = scratch.add(3 * count * call.index_bytes);
    places_at = scratch.add(2 * count * call.index_bytes);
    ones_bytes = scratch.bytes();
    starts_at = scratch.add(kRegionsBytes);
    ranks_at = scratch.add(4 * 2 * count);
    staging_at = scratch.add(count * call.traffic.row_bytes);
  }
};

void swap_part(const LaunchScope& scope, const SwapCall& call, const LoadedKernels& list_kernels,
               const LoadedKernels& kernels, const SwapScratch& at, char* base) {
  const i64 count = call.traffic.num_rows;
  const i64 row_bytes = call.traffic.row_bytes;
  SwapListParams list{call.params};
  list.regions = cut_regions(call.traffic.span_bytes, kNumMoveKinds);
  const auto words_at = [base](i64 at) { return reinterpret_cast<u32*>(base + at); };

  list.regions.last_ranks = words_at(at.last_ranks_at);
  list.regions.starts = words_at(at.starts_at);
  list.regions.last_entry = words_at(at.counters_at);
  list.ranks = words_at(at.ranks_at);
  list.moves = base + at.moves_at;
  list.places = base + at.places_at;
  scope.fill_bytes(base, 0xff, at.ones_bytes);
  launch_sort(scope, list_kernels, count, list);

  SwapParams moves = call.params;
  moves.triples = list.moves;
  moves.staging = base + at.staging_at;
  moves.last_batch = words_at(at.counters_at) + 1;
  scope.launch(kernels.entries[kSwapStaged], num_copy_blocks(scope, kernels, count, call.num_sms),
               moves);

  PairCopyParams places{};
  places.dst = moves.gpu;
  places.src = moves.staging;
  places.dst_stride_bytes = moves.gpu_stride_bytes;
  places.src_stride_bytes = row_bytes;
  places.pairs = list.places;
  places.num_pairs = places.num_src_rows = count;
  places.num_dst_rows = moves.num_slots;
  places.src_site = places.dst_site = moves.slot_site;
  places.fault = moves.fault;
  scope.launch(kernels.entries[kPlaceStaged], scope.device.num_sms, places);
}

}  // namespace

void swap_in_order(const LaunchScope& scope, const SwapCall& call, const LoadedKernels& kernels) {
  const LoadedKernels& list_kernels = triple_list_kernels(scope.device, call.index_bytes);
  const i64 count = call.params.num_triples;
  const i64 triple_bytes = call.traffic.row_bytes + 5 * call.index_bytes + 8;
  const i64 most = std::max(i64(1), kMaxScratchBytes / triple_bytes);
  const i64 of_part = ceil_div(count, ceil_div(count, most));
  // Once, for the first part, which is the largest: a later one that found no memory would leave
  // the call half made, and to make it again is to swap back what was swapped.
  const SwapScratch at(call, of_part);
  const tvm::ffi::Tensor memory = at.scratch.allocate_on(call.device);
  for (i64 first = 0; first < count; first += of_part) {
    SwapCall part = call;
    SwapParams& params = part.params;
    params.triples = static_cast<const char*>(call.params.triples) + 3 * first * call.index_bytes;
    params.first_position = first;
    params.num_triples = part.traffic.num_rows = std::min(of_part, count - first);
    swap_part(scope, part, list_kernels, kernels, at, static_cast<char*>(memory.data_ptr()));
  }
}

}  // namespace jitkern
