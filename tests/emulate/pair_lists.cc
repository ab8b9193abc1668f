// The lists of large calls of h2d_gather and d2h_scatter; the copies that they ask for are proved
// in pair_copy.cc.
#include "ops/sort.cuh"

#include <map>
#include <set>

#include "pairs.h"

namespace emulate {

constexpr i64 kRowBytes = 24;
constexpr i64 kUntouched = -9;  // where no entry was written

// Exactly the counters of a call's regions, which start as all ones, and what is made of them.
struct RegionBuffers {
  int shift;
  AlignedWords last_ranks, starts;

  // Regions of the smallest size that `span_bytes` allow, or of a few times that.
  RegionBuffers(i64 span_bytes, Random& random)
      : shift(0), last_ranks(kNumRegions, 0xffffffffu), starts(kNumRegions, 0x99999999u) {
    while ((span_bytes - 1) >> shift >= i64(kNumRegions)) ++shift;
    shift += static_cast<int>(random.below(4));
  }

  Regions regions(u32* last_entry) { return {last_ranks.data(), starts.data(), last_entry, shift}; }
};

// A thread a row.
template <class Kernel>
void run_list(i64 num_rows, const typename Kernel::Params& params, Random& random) {
  launch_fibers({ceil_div(num_rows, Kernel::kNumThreads)}, {Kernel::kNumThreads}, any_order(random),
                [&] { Kernel::run(params); });
}

i64 table_size_for(i64 num_pairs) {
  i64 size = 2;
  while (size < 2 * num_pairs) size *= 2;
  return size;
}

void scan(const Regions& regions, Random& random) {
  using Scan = ScanRegions<kScanConfig.num_threads, 1>;
  launch_fibers({1}, {Scan::kNumThreads}, any_order(random), [&] { Scan::run(regions); });
}

struct Call {
  std::vector<i64> flat;  // pairs
  i64 num_pairs, src_rows, dst_rows;

  bool valid(const IntBuffer& pairs, i64 i) const {
    const i64 source = pairs.at(2 * i);
    const i64 target = pairs.at(2 * i + 1);
    return source >= 0 && target >= 0 && source < src_rows && target < dst_rows;
  }
};

Call any_call(int index_bytes, bool repeats, Random& random) {
  Call call;
  call.num_pairs = random.pick({i64(1), i64(2), i64(255), i64(256), i64(257), i64(700)});
  call.src_rows = random.pick({i64(1), i64(5), call.num_pairs, 100 * call.num_pairs});
  call.dst_rows = call.num_pairs + random.below(call.num_pairs);
  if (!repeats) call.src_rows += call.num_pairs;
  call.flat = any_pairs(call.num_pairs, call.src_rows, call.dst_rows, index_bytes, random, repeats);
  return call;
}

// The lists must hold each valid pair once, and each source row at most once among the fetches.
void check_lists(const Call& call, const IntBuffer& pairs, const IntBuffer& fetches,
                 i64 num_fetches, const IntBuffer& copies, i64 num_copies) {
  std::multiset<std::pair<i64, i64>> asked, answered;
  for (i64 i = 0; i < call.num_pairs; ++i) {
    if (call.valid(pairs, i)) asked.insert({pairs.at(2 * i + 1), pairs.at(2 * i)});
  }
  std::map<i64, i64> source_at;  // key: row of dst, after the fetches
  std::set<i64> fetched;
  for (i64 i = 0; i < num_fetches; ++i) {
    const i64 source = fetches.at(2 * i);
    const i64 target = fetches.at(2 * i + 1);
    if (!fetched.insert(source).second) {
      fail("source row " + std::to_string(source) + " is fetched twice");
    }
    source_at[target] = source;
    answered.insert({target, source});
  }
  for (i64 i = 0; i < num_copies; ++i) {
    const auto at = source_at.find(copies.at(2 * i));
    if (at == source_at.end()) fail("a copy from a row that holds nothing");
    answered.insert({copies.at(2 * i + 1), at->second});
  }
  if (asked != answered) fail("the lists do not hold the pairs that were asked for");
  for (i64 i = num_fetches; i < call.num_pairs; ++i) {
    if (fetches.at(2 * i) != kUntouched) fail("written behind the fetches");
  }
  for (i64 i = num_copies; i < call.num_pairs; ++i) {
    if (copies.at(2 * i) != kUntouched) fail("written behind the copies");
  }
}

void check_order(const IntBuffer& fetches, i64 num_fetches, HostSide side, int shift) {
  for (i64 i = 1; i < num_fetches; ++i) {
    const auto region = [&](i64 k) {
      return fetches.at(2 * k + (side == kHostSource ? 0 : 1)) * kRowBytes >> shift;
    };
    if (region(i - 1) > region(i)) fail("fetch " + std::to_string(i) + " is out of order");
  }
}

template <class Int, HostSide kSide>
void one_run(Random& random) {
  constexpr int kIndexBytes = sizeof(Int);
  const bool searched = kSide == kHostSource && random.below(4) != 0;
  const bool ordered = !searched || random.below(2) == 0;
  const Call call = any_call(kIndexBytes, searched, random);
  IntBuffer pairs("pairs", call.flat, kIndexBytes);
  const i64 table_size = table_size_for(call.num_pairs);
  IntBuffer table("table", table_size, -1, 4);
  IntBuffer last_entries("counts", {-1, -1, -1}, 4);
  const std::vector<i64> untouched(2 * call.num_pairs, kUntouched);
  IntBuffer fetches("fetches", untouched, kIndexBytes);
  IntBuffer copies("copies", untouched, kIndexBytes);
  const i64 host_rows = kSide == kHostSource ? call.src_rows : call.dst_rows;
  RegionBuffers region_buffers(host_rows * kRowBytes, random);
  IntBuffer ranks("ranks", call.num_pairs, kUntouched, 4);

  FaultWord fault(random.pick({0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < call.num_pairs; ++i) {
    const i64 source = pairs.at(2 * i);
    const i64 target = pairs.at(2 * i + 1);
    expect_pair(fault, i, source, target, call.src_rows, call.dst_rows);
  }
  RowBuffer src("src", call.src_rows, kRowBytes, {0, kRowBytes}, random);
  RowBuffer dst("dst", call.dst_rows, kRowBytes, {0, kRowBytes}, random);
  ListParams list{pair_params(dst, src, pairs, fault)};
  list.table = searched ? table.words() : nullptr;
  list.table_mask = static_cast<u32>(table_size - 1);
  list.last_entries = last_entries.words();
  list.fetches = fetches.data();
  list.copies = copies.data();
  list.regions = region_buffers.regions(list.last_entries);
  if (ordered) list.ranks = ranks.words();
  using List = ListPairs<kIndexBytes, kListConfig.num_threads, 1, kSide>;
  using Place = PlacePairs<kIndexBytes, kListConfig.num_threads, 1, kSide>;
  const Rewriter rewriter(pairs, {call.src_rows, call.dst_rows});
  run_list<List>(call.num_pairs, list, random);
  if (ordered) scan(list.regions, random);
  if (ordered) run_list<Place>(call.num_pairs, list, random);
  if (has_race) return;
  fault.check();
  const i64 num_fetches = last_entries.at(0) + 1;
  const i64 num_copies = last_entries.at(1) + 1;
  check_lists(call, pairs, fetches, num_fetches, copies, num_copies);
  if (ordered) check_order(fetches, num_fetches, kSide, region_buffers.shift);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  rounds("pair_lists", 600, [&](Random& random, int run) {
    run % 2 ? one_run<i32, kHostSource>(random) : one_run<i64, kHostSource>(random);
    if (run % 3 != 0) return;
    run % 2 ? one_run<i32, kHostTarget>(random) : one_run<i64, kHostTarget>(random);
  });
}
