// The launches of a large call on pairs: its lists, then the copies that they ask for.
#include "pair_lists.h"

#include "pairs_host.h"

namespace jitkern {

// The module of lists is list_kernel() in ops/pairs.py.
const LoadedKernels& list_kernels(const Device& device, const PairCall& call) {
  static KernelTable table("pair_lists", {"index_bytes", "host_target"},
                           [](const Spec&, int, int) { return GroupShape{1, 1, 1, 1}; });
  return table.find(device, Spec(call.index_bytes, call.host_side == kHostTarget));
}

ListsToMake allocate_lists(const PairCall& call, const Lists& lists) {
  const PairCopyParams& p = call.params;
  ListParams list{p};
  list.slot_map_site = lists.slot_map_site;
  if (!lists.reuse_resident) list.slot_map = nullptr;

  // The first pieces start as all ones.
  Scratch scratch;
  i64 table_size = 0;
  if (lists.search) {
    for (table_size = 2; table_size < 2 * p.num_pairs;) table_size *= 2;
  }
  const i64 table_at = scratch.add(4 * table_size);
  const i64 counters_at = scratch.add(4 * 3);
  const i64 regions_bytes = lists.ordered ? 4 * i64(kNumRegions) : 0;
  const i64 last_ranks_at = scratch.add(regions_bytes);
  const i64 ones_bytes = scratch.bytes();
  const i64 starts_at = scratch.add(regions_bytes);
  const i64 ranks_at = scratch.add(lists.ordered ? 4 * p.num_pairs : 0);
  const i64 list_bytes = 2 * p.num_pairs * call.index_bytes;
  const i64 fetches_at = scratch.add(list_bytes);
  const i64 copies_at = scratch.add(lists.search ? list_bytes : 0);
  const i64 copied_rows_at = scratch.add(lists.search ? list_bytes / 2 : 0);
  const tvm::ffi::Tensor memory = scratch.allocate_on(call.device);
  char* base = static_cast<char*>(memory.data_ptr());
  const auto words_at = [base](i64 at) { return reinterpret_cast<u32*>(base + at); };

  if (lists.search) list.table = words_at(table_at);
  list.table_mask = static_cast<u32>(table_size - 1);
  list.last_entries = words_at(counters_at);
  list.fetches = base + fetches_at;
  list.copies = base + copies_at;
  list.copied_rows = base + copied_rows_at;
  if (lists.ordered) {
    list.ranks = words_at(ranks_at);
    list.regions = cut_regions(call.span_bytes);
    list.regions.last_ranks = words_at(last_ranks_at);
    list.regions.starts = words_at(starts_at);
    list.regions.last_entry = list.last_entries;
  }
  return {{memory, lists, list.last_entries, list.fetches, list.copies, list.copied_rows},
          list,
          ones_bytes};
}

const MadeLists& make_lists(const LaunchScope& scope, const PairCall& call,
                            const ListsToMake& lists) {
  const LoadedKernels& kernels = list_kernels(scope.device, call);
  const i64 num_pairs = call.params.num_pairs;
  scope.fill_bytes(lists.made.memory.data_ptr(), 0xff, lists.ones_bytes);
  if (lists.made.lists.ordered) {
    launch_sort(scope, kernels, num_pairs, lists.params);
  } else {
    launch_threads(scope, kernels.entries[kListEntry], num_pairs, lists.params);
  }
  return lists.made;
}

void copy_by_lists(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                   const MadeLists& made) {
  const PairCopyParams& p = call.params;
  PairCopyParams fetch = p;
  fetch.pairs = made.fetches;
  fetch.last_pair = made.last_entries;
  fetch.last_batch = made.last_entries + 2;
  const i64 in_flight =
      made.lists.ordered ? ordered_bytes_in_flight(call.traffic(), kBytesInFlight) : kBytesInFlight;
  launch_pair_copy(scope, call, kernels, fetch, in_flight);
  if (!made.lists.search) return;

  PairCopyParams copy = p;
  copy.pairs = made.copies;
  copy.last_pair = made.last_entries + 1;
  copy.src = p.dst;
  copy.src_stride_bytes = p.dst_stride_bytes;
  copy.num_src_rows = p.num_dst_rows;
  copy.slot_rows = made.copied_rows;
  scope.launch(kernels.entries[0], scope.device.num_sms, copy);
}

namespace {

bool goes_by_lists(const PairCall& call, const Lists& lists) {
  return (lists.search || lists.ordered) && call.params.num_pairs <= kMaxListedPairs;
}

}  // namespace

void find_pair_kernels(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                       const Lists& lists, bool in_parts) {
  const bool listed = goes_by_lists(call, lists);
  const bool large = listed || !is_small_call(call);
  if (listed) list_kernels(scope.device, call);
  table.find(scope.device, pair_spec(call, large));
  if (in_parts && !listed) table.find(scope.device, pair_spec(call, !large));
}

void launch_pairs(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                  const Lists& lists) {
  const bool listed = goes_by_lists(call, lists);
  const Spec spec = pair_spec(call, listed || !is_small_call(call));
  const LoadedKernels& kernels = table.find(scope.device, spec);
  if (listed) {
    copy_by_lists(scope, call, kernels, make_lists(scope, call, allocate_lists(call, lists)));
  } else {
    launch_pair_copy(scope, call, kernels, call.params, kBytesInFlight);
  }
}

}  // namespace jitkern
