// Whether sorting by host address pays; the launches of a large call on pairs: lists, then copies.
#include <algorithm>

#include "pairs_host.h"

namespace jitkern {

namespace {

// The span of host memory whose random rows still hit the link's address translation cache. Rows of
// 656 bytes from 0.75 / 1 / 1.5 / 2 / 4 / 16 GiB: 48 / 44 / 34 / 29 / 23 / 19 GB/s; in order 48 up
// to 8 GiB, 43 at 16.
constexpr i64 kReachBytes = i64(768) << 20;
// A translation miss costs the time of 1.7 KB: rows of 2 KB out of 16 GiB reach 45 GB/s unsorted
// and 51 sorted, rows of 3 KB 51 either way.
constexpr i64 kMaxRowBytesToOrder = 2048;
// The sort takes 10 us. Calls of 2,048 rows are faster without it. Calls of 4,096 are as fast (64
// GiB) or slower (16 and 2 GiB) without it, except from 1 GiB, where one row in four misses.
constexpr i64 kMinRowsToOrder = 4096;
constexpr double kMinMissesToOrder = 2560;

// Bytes in flight in a sorted call: 4 SMs with rows of 656 bytes (3 SMs lose 5 % at 8 GiB). Twice
// as many above kLargeSpanBytes: at 16 GiB 8 SMs move 43.2 GB/s, 4 move 41.1.
constexpr i64 kOrderedBytesInFlight = 512 << 10;
constexpr i64 kLargeSpanBytes = i64(8) << 30;
// Rows in flight should lie within this span: 32,768 rows from 64 GiB reach 23.7 GB/s on 4
// SMs, 20.7 on 8.
constexpr i64 kInFlightSpanBytes = i64(1) << 30;

bool goes_by_lists(const PairArgs& call) {
  return (call.lists.search || call.lists.ordered) && call.params.num_pairs <= kMaxListedPairs;
}

const LoadedKernels& list_kernels(const Device& device, const PairArgs& call) {
  static KernelTable table = sort_kernels("pair_lists", {"index_bytes", "host_target"});
  return table.find(device, Spec(call.index_bytes, call.host_side == kHostTarget));
}

// Lists the pairs of the call, then copies the rows of the lists.
void copy_by_lists(const LaunchScope& scope, const PairArgs& call, const LoadedKernels& kernels) {
  const Lists& lists = call.lists;
  const PairCopyParams& p = call.params;
  ListParams list{p};
  if (lists.ordered) list.regions = cut_regions(call.span_bytes);
  const i64 table_size = lists.search ? table_size_for(list.num_pairs) : 0;
  list.table_mask = static_cast<u32>(table_size - 1);
  const i64 list_bytes = 2 * list.num_pairs * call.index_bytes;
  const i64 regions_bytes = lists.ordered ? 4 * i64(kNumRegions) : 0;
  Scratch scratch;
  scratch.add(list.table, 4 * table_size);
  scratch.add(list.last_entries, 4 * 3);
  scratch.add(list.regions.last_ranks, regions_bytes);
  const i64 ones_bytes = scratch.bytes();
  scratch.add(list.regions.starts, regions_bytes);
  scratch.add(list.ranks, lists.ordered ? 4 * list.num_pairs : 0);
  scratch.add(list.fetches, list_bytes);
  scratch.add(list.copies, lists.search ? list_bytes : 0);
  const tvm::ffi::Tensor memory = scratch.allocate_on(call.device());
  list.regions.last_entry = list.last_entries;
  scope.fill_bytes(memory.data_ptr(), 0xff, ones_bytes);
  const LoadedKernels& sort = list_kernels(scope.device, call);
  if (lists.ordered) {
    launch_sort(scope, sort, list.num_pairs, list);
  } else {
    launch_list(scope, sort.entries[kListEntry], list.num_pairs, list);
  }

  PairCopyParams fetch = p;
  fetch.pairs = list.fetches;
  fetch.last_pair = list.last_entries;
  fetch.last_batch = list.last_entries + 2;
  const i64 in_flight =
      lists.ordered ? ordered_bytes_in_flight(call.traffic(), kBytesInFlight) : kBytesInFlight;
  launch_pair_copy(scope, call, kernels, fetch, in_flight);
  if (!lists.search) return;

  PairCopyParams copy = p;
  copy.src = p.dst;
  copy.src_stride_bytes = p.dst_stride_bytes;
  copy.num_src_rows = p.num_dst_rows;
  copy.pairs = list.copies;
  copy.last_pair = list.last_entries + 1;
  copy.slot_map = nullptr;  // the fetches have set it
  scope.launch(kernels.entries[0], scope.device.num_sms, copy);
}

}  // namespace

bool is_worth_ordering(const HostTraffic& traffic) {
  if (traffic.span_bytes < 1) return false;
  if (traffic.num_rows < kMinRowsToOrder || traffic.row_bytes > kMaxRowBytesToOrder) return false;
  const double hits = double(kReachBytes) / double(traffic.span_bytes);
  return double(traffic.num_rows) * (1.0 - hits) >= kMinMissesToOrder;
}

bool order_arg(const char* op, AnyView value, const HostTraffic& traffic) {
  const int choice = choice_arg(op, "order", value, {"auto", "given", "sorted"});
  return choice == 0 ? is_worth_ordering(traffic) : choice == 2 && traffic.span_bytes >= 1;
}

i64 ordered_bytes_in_flight(const HostTraffic& traffic, i64 unsorted) {
  const bool is_large = traffic.span_bytes > kLargeSpanBytes;
  const i64 wanted = is_large ? 2 * kOrderedBytesInFlight : kOrderedBytesInFlight;
  const double bytes = double(traffic.num_rows) * double(traffic.row_bytes);
  const double within = double(kInFlightSpanBytes) / double(traffic.span_bytes) * bytes;
  return within < double(wanted) ? std::max(unsorted, static_cast<i64>(within)) : wanted;
}

KernelTable sort_kernels(const char* name, std::vector<const char*> names) {
  return KernelTable(name, std::move(names),
                     [](const Spec&, int, int) { return GroupShape{1, 1, 1, 1}; });
}

Regions cut_regions(i64 span_bytes) {
  Regions regions{};
  while (((span_bytes - 1) >> regions.shift) >= i64(kNumRegions)) ++regions.shift;
  return regions;
}

i64 table_size_for(i64 num_pairs) {
  i64 size = 2;
  while (size < 2 * num_pairs) size *= 2;
  return size;
}

const LoadedKernels& find_pair_kernels(const LaunchScope& scope, const PairArgs& call) {
  const bool listed = goes_by_lists(call);
  const bool large = listed || !is_small_call(call);
  if (listed) list_kernels(scope.device, call);
  return call.table->find(scope.device, pair_spec(call, large));
}

void launch_pairs(const LaunchScope& scope, const PairArgs& call) {
  const LoadedKernels& kernels = find_pair_kernels(scope, call);
  if (goes_by_lists(call)) return copy_by_lists(scope, call, kernels);
  launch_pair_copy(scope, call, kernels, call.params, kBytesInFlight);
}

}  // namespace jitkern
