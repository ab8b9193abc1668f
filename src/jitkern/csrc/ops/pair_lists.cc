// The launches of a large call on pairs: its lists, then the copies that they ask for.
#include "pair_lists.h"

#include <algorithm>
#include <string>

#include "pairs_host.h"

namespace jitkern {

namespace {

// The span of host memory whose random rows still hit in the link's address translation: on an H200
// those of 656 bytes out of 0.75 / 1 / 1.5 / 2 / 4 / 16 GiB come at 48 / 44 / 34 / 29 / 23 / 19
// GB/s, in order at 48 to 8 GiB and 43 at 16.
constexpr i64 kReachBytes = i64(768) << 20;
// A miss lasts as long as 1.7 KB: rows of 2 KB out of 16 GiB come at 45, those of 3 KB at 51 GB/s
// as they are, in order both at 51.
constexpr i64 kMaxRowBytesToOrder = 2048;
// The sort takes 10 us. Calls of 2,048 rows are faster without, of 4,096 as fast (64 GiB) or slower
// (16 and 2 GiB), but out of 1 GiB, where one row in four misses.
constexpr i64 kMinPairsToOrder = 4096;
constexpr double kMinMissesToOrder = 2560;

// What a sorted call has on its way: 4 SMs with rows of 656 bytes, where 3 lose 5 % at 8 GiB, and 8
// beyond, which at 16 GiB move 43.2 GB/s where 4 move 41.1 ...
constexpr i64 kOrderedBytesInFlight = 512 << 10;
constexpr i64 kLargeSpanBytes = i64(8) << 30;
// ... but no more rows than lie within 1 GiB of each other: 32,768 out of 64 GiB come at 23.7 GB/s
// on 4 SMs, at 20.7 on 8.
constexpr i64 kInFlightSpanBytes = i64(1) << 30;
i64 ordered_bytes_in_flight(const PairCall& call) {
  const bool is_large = call.span_bytes > kLargeSpanBytes;
  const i64 wanted = is_large ? 2 * kOrderedBytesInFlight : kOrderedBytesInFlight;
  const double within = double(kInFlightSpanBytes) / double(call.span_bytes) * double(call.bytes());
  return within < double(wanted) ? std::max(kBytesInFlight, static_cast<i64>(within)) : wanted;
}

// The regions that a call is sorted by: as many as a scan of a few microseconds sums up, 64 KiB
// each at 16 GiB.
constexpr i64 kMaxRegions = 1 << 18;

// Entry points of the module of lists: see list_kernel() in ops/pairs.py.
enum Entry : int { kListPairs, kScanRegions, kPlacePairs };

// Scratch memory of a call, cut into pieces of whole 16 bytes.
class Scratch {
 public:
  i64 add(i64 bytes) {
    const i64 at = bytes_;
    bytes_ += ceil_div(bytes, 16) * 16;
    return at;
  }
  i64 bytes() const { return bytes_; }

 private:
  i64 bytes_ = 0;
};

i64 power_of_two_from(i64 at_least) {
  i64 power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// As many regions as there are pairs at most, the shift that cuts the host's rows into them.
void cut_regions(ListParams& list, i64 span, i64 scan_regions) {
  const i64 limit = std::clamp(power_of_two_from(list.num_pairs), scan_regions, kMaxRegions);
  list.region_shift = 7;  // no finer than a line
  while (((span - 1) >> list.region_shift) >= limit) ++list.region_shift;
  const i64 regions = ((span - 1) >> list.region_shift) + 1;
  list.num_regions = static_cast<u32>(ceil_div(regions, scan_regions) * scan_regions);
}

}  // namespace

const LoadedKernels& list_kernels(const Device& device, const PairCall& call) {
  static KernelTable table("pair_lists", {"index_bytes", "host_target"},
                           [](const Spec&, int, int) { return GroupShape{1, 1, 1, 1}; });
  return table.find(device, Spec(call.index_bytes, call.host_side == kHostTarget));
}

MadeLists make_lists(const LaunchScope& scope, const PairCall& call, const Lists& lists,
                     int num_copies) {
  const LoadedKernels& kernels = list_kernels(scope.device, call);
  const PairCopyParams& p = call.params;
  ListParams list{p};
  list.slot_map_site = lists.slot_map_site;
  if (!lists.reuse_resident) list.slot_map = nullptr;

  // The first pieces start as all ones.
  Scratch scratch;
  const i64 table_size = lists.search ? power_of_two_from(2 * p.num_pairs) : 0;
  const i64 table_at = scratch.add(4 * table_size);
  const i64 counters_at = scratch.add(4 * (2 + num_copies));
  const i64 scan_regions = i64(kernels.entries[kScanRegions].num_threads) * kScanRegionsPerThread;
  if (lists.ordered) cut_regions(list, call.span_bytes, scan_regions);
  const i64 last_ranks_at = scratch.add(4 * i64(list.num_regions));
  const i64 ones_bytes = scratch.bytes();
  const i64 starts_at = scratch.add(4 * i64(list.num_regions));
  const i64 ranks_at = scratch.add(lists.ordered ? 4 * p.num_pairs : 0);
  const i64 list_bytes = 2 * p.num_pairs * call.index_bytes;
  const i64 fetches_at = scratch.add(list_bytes);
  const i64 copies_at = scratch.add(lists.search ? list_bytes : 0);
  const i64 copied_rows_at = scratch.add(lists.search ? list_bytes / 2 : 0);
  const tvm::ffi::Tensor memory =
      allocate({scratch.bytes()}, DLDataType{kDLUInt, 8, 1}, call.device);
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
    list.last_ranks = words_at(last_ranks_at);
    list.region_starts = words_at(starts_at);
  }
  scope.fill_bytes(base, 0xff, ones_bytes);
  const auto launch = [&](Entry entry, i64 num_threads) {
    const Kernel& kernel = kernels.entries[entry];
    scope.launch(kernel, ceil_div(num_threads, kernel.num_threads), list);
  };
  launch(kListPairs, p.num_pairs);
  if (lists.ordered) {
    launch(kScanRegions, list.num_regions / kScanRegionsPerThread);
    launch(kPlacePairs, p.num_pairs);
  }

  return {memory, lists, list.last_entries, list.fetches, list.copies, list.copied_rows};
}

void copy_by_lists(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                   const MadeLists& made, int number) {
  const PairCopyParams& p = call.params;
  PairCopyParams fetch = p;
  fetch.pairs = made.fetches;
  fetch.last_pair = made.last_entries;
  fetch.last_batch = made.last_entries + 2 + number;
  const i64 in_flight = made.lists.ordered ? ordered_bytes_in_flight(call) : kBytesInFlight;
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

bool is_worth_ordering(const PairCall& call) {
  const i64 num_pairs = call.params.num_pairs;
  if (num_pairs < kMinPairsToOrder || call.row_bytes > kMaxRowBytesToOrder) return false;
  const double hits = double(kReachBytes) / double(call.span_bytes);
  return double(num_pairs) * (1.0 - hits) >= kMinMissesToOrder;
}

bool order_arg(const PairArgs& args, AnyView value) {
  if (is_none(value)) return is_worth_ordering(args);
  const char* by_host = args.host_side == kHostSource ? "source" : "destination";
  const auto text = value.as<tvm::ffi::String>();
  if (text && (*text == by_host || *text == "given")) return *text == by_host;
  const std::string expected = "\"auto\", \"" + std::string(by_host) + "\" or \"given\"";
  if (!text) raise_type_error(args.src.op, "order", value, expected);
  raise_value_error(args.src.op, "order", "\"" + std::string(*text) + "\"", expected);
}

void launch_pairs(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                  const Lists& lists) {
  const bool listed = (lists.search || lists.ordered) && call.params.num_pairs <= kMaxListedPairs;
  const Spec spec = pair_spec(call, listed || !is_small_call(call));
  const LoadedKernels& kernels = table.find(scope.device, spec);
  if (listed) {
    copy_by_lists(scope, call, kernels, make_lists(scope, call, lists));
  } else {
    launch_pair_copy(scope, call, kernels, call.params, kBytesInFlight);
  }
}

}  // namespace jitkern
