// Which rows are each rank's in peer_gather and peer_scatter, and then the copies of all ranks.
#include "comm/peer_lists.cu"
#include "comm/peer_copy.cu"

#include <map>
#include <set>

#include "lists.h"

namespace emulate {

// Of the copies, which have sweeps of their own, one row size will do.
constexpr i64 kRowBytes = 24;
constexpr int kVecBytes = 8;

using PairOf = std::pair<i64, i64>;

struct Call {
  std::vector<i64> flat;  // pairs
  i64 num_pairs, src_rows, dst_rows;

  PairOf pair(i64 i) const { return {flat[2 * i], flat[2 * i + 1]}; }
  bool valid(i64 i) const {
    const auto [source, target] = pair(i);
    return source >= 0 && target >= 0 && source < src_rows && target < dst_rows;
  }
};

Call any_call(HostSide side, int index_bytes, Random& random) {
  Call call;
  call.num_pairs = random.pick({i64(1), i64(2), i64(3), i64(5), i64(7), i64(12), i64(20), i64(30),
                                i64(256), i64(257), i64(700)});
  const i64 many = 100 * call.num_pairs;
  call.src_rows = random.pick({i64(1), i64(5), call.num_pairs, many});
  call.dst_rows = call.num_pairs + random.below(call.num_pairs + 1);
  if (side != kHostSource) call.dst_rows = random.pick({call.num_pairs, many});
  call.flat = any_pairs(call.num_pairs, call.src_rows, call.dst_rows, index_bytes, random);
  return call;
}

// What the ranks together are to do: the first pair of each row, and what the others copy.
struct Expected {
  std::multiset<PairOf> fetches, copies;
  std::map<i64, i64> of_region;  // how many are fetched
  i64 largest_region = 0;

  Expected(const Call& call, HostSide side, int shift) {
    std::map<i64, i64> first;  // by source row: its destination
    for (i64 i = 0; i < call.num_pairs; ++i) {
      if (!call.valid(i)) continue;
      const auto [source, target] = call.pair(i);
      if (side == kHostSource && !first.emplace(source, target).second) {
        copies.insert({first[source], target});
        continue;
      }
      fetches.insert({source, target});
      i64& count = of_region[(side == kHostSource ? source : target) * kRowBytes >> shift];
      largest_region = std::max(largest_region, ++count);
    }
  }
};

// One rank: its lists, in memory of exactly their sizes.
template <class Int, HostSide kSide>
struct Rank {
  static constexpr int kIndexBytes = sizeof(Int);
  using List = ListPeerPairs<kIndexBytes, kListConfig.num_threads, 1, kSide>;
  using Place = PlacePeerPairs<kIndexBytes, kListConfig.num_threads, 1, kSide>;

  const Call& call;
  IntBuffer pairs, table, last_entries, fetches, copies, places, cursors;
  RegionBuffers regions;
  FaultWord fault;
  PeerListParams list{};

  Rank(const Call& of, u32 rank, u32 num_ranks, i64 table_size, u64 seed, Random& random)
      : call(of),
        pairs("pairs", of.flat, kIndexBytes),
        table("table", table_size, -1, 4),
        last_entries("counts", {-1, -1, -1, -1}, 4),
        fetches("fetches", 2 * of.num_pairs, -1, kIndexBytes),
        copies("copies", 2 * of.num_pairs, -9, kIndexBytes),
        places("places", of.num_pairs, -9, 4),
        cursors("cursors", kNumRegions, -1, 4),
        regions(regions_of(of, seed)),
        fault(random.pick({0u, 0u, 0u, 1u, 2u})) {
    for (i64 i = 0; i < call.num_pairs; ++i) {
      const auto [source, target] = call.pair(i);
      expect_pair(fault, i, source, target, call.src_rows, call.dst_rows);
    }
    list.pairs = pairs.data();
    list.num_pairs = call.num_pairs;
    list.num_src_rows = call.src_rows;
    list.num_dst_rows = call.dst_rows;
    list.src_stride_bytes = list.dst_stride_bytes = kRowBytes;
    if (kSide == kHostSource) list.table = table.words();
    list.table_mask = static_cast<u32>(table_size - 1);
    list.last_entries = last_entries.words();
    list.places = places.words();
    list.fetches = fetches.data();
    list.copies = copies.data();
    list.cursors = cursors.words();
    list.src_site = kSrcSite;
    list.dst_site = kDstSite;
    list.fault = fault.record();
    list.regions = regions.regions(list.last_entries + 2);
    list.rank = rank;
    list.num_ranks = num_ranks;
  }

  // The same of all ranks, as the pool is.
  static RegionBuffers regions_of(const Call& call, u64 seed) {
    Random random(seed);
    return RegionBuffers((kSide == kHostSource ? call.src_rows : call.dst_rows) * kRowBytes,
                         random);
  }

  void make(Random& random, bool changes) {
    run_list<List>(call.num_pairs, list, random);
    scan(list.regions, random);
    if (changes) rewrite<Int>(pairs, call.src_rows, call.dst_rows, random);
    run_list<Place>(call.num_pairs, list, random);
  }

  i64 num_fetches() const { return last_entries.at(0) + 1; }
  i64 num_copies() const { return last_entries.at(1) + 1; }

  // Takes what it fetches from `all`, in the order of regions; returns how many.
  i64 check(std::multiset<PairOf>& all, const Expected& expected) {
    i64 count = 0, region = 0;
    for (i64 i = 0; i < call.num_pairs; ++i) {
      const PairOf one{fetches.at(2 * i), fetches.at(2 * i + 1)};
      if (one.first == -1 && one.second == -1) continue;
      if (i >= num_fetches()) fail("written behind the fetches");
      const auto found = all.find(one);
      if (found == all.end()) fail("fetches what another rank does, or nobody should");
      all.erase(found);
      const i64 next = (kSide == kHostSource ? one.first : one.second) * kRowBytes >> regions.shift;
      if (next < region) fail("fetches are out of order");
      region = next;
      ++count;
    }
    std::multiset<PairOf> own;
    for (i64 i = 0; i < num_copies(); ++i) own.insert({copies.at(2 * i), copies.at(2 * i + 1)});
    if (own != expected.copies) fail("other copies");
    for (i64 i = num_copies(); i < call.num_pairs; ++i) {
      if (copies.at(2 * i) != -9) fail("written behind the copies");
    }
    // What its kernel goes through: its part, and the rest of two regions.
    if (num_fetches() > count + 2 * expected.largest_region) fail("a list that is mostly empty");
    fault.check();
    return count;
  }
};

template <class Int, HostSide kSide>
void one_run(Random& random) {
  constexpr int kIndexBytes = sizeof(Int);
  const Call call = any_call(kSide, kIndexBytes, random);
  const u32 num_ranks = static_cast<u32>(2 + random.below(7));
  const i64 table_size = table_size_for(call.num_pairs);
  const u64 seed = static_cast<u64>(random.bits());
  const bool changes = random.below(8) == 0;
  std::vector<Rank<Int, kSide>> ranks;
  for (u32 r = 0; r < num_ranks; ++r) {
    ranks.emplace_back(call, r, num_ranks, table_size, seed, random);
    ranks[r].make(random, changes);
  }
  if (changes) return;
  const Expected expected(call, kSide, ranks[0].regions.shift);
  std::multiset<PairOf> left = expected.fetches;
  const i64 total = static_cast<i64>(left.size());
  for (u32 r = 0; r < num_ranks; ++r) {
    const i64 count = ranks[r].check(left, expected);
    // In its regions by a hash: within what one may hold.
    if (std::abs(count - total / num_ranks) > 2 * expected.largest_region + 1)
      fail("unequal parts");
  }
  if (!left.empty()) fail("nobody fetches a row");

  // The copies, as the host launches them; of one rank in eight nothing, whose barrier was given
  // up.
  const bool to_all = kSide == kHostSource;
  RowBuffer src("src", call.src_rows, kRowBytes, kRowBytes, 0, random);
  std::vector<RowBuffer> dsts;
  for (u32 r = 0; r < (to_all ? num_ranks : 1); ++r) {
    dsts.emplace_back("dst", call.dst_rows, kRowBytes, kRowBytes, 0, random);
  }
  const bool is_broken = random.below(8) == 0;
  u32 intact = is_broken ? 2 : kUnwritten;
  for (i64 i = 0; !is_broken && i < call.num_pairs; ++i) {
    if (!call.valid(i)) continue;
    const auto [source, target] = call.pair(i);
    for (auto& dst : dsts) std::memcpy(dst.expected(target), src.row(source), kRowBytes);
  }
  using Copy =
      std::conditional_t<kSide == kHostSource,
                         PeerGather<kRowBytes, 1024, 1, kVecBytes, kIndexBytes, false, true, 4>,
                         PeerScatter<kRowBytes, 1024, 1, kVecBytes, kIndexBytes, false, true, 4>>;
  std::vector<PeerCopyParams> calls;
  for (u32 r = 0; r < num_ranks; ++r) {
    Rank<Int, kSide>& rank = ranks[r];
    PeerCopyParams fetch{};
    static_cast<PairCopyParams&>(fetch) =
        pair_params(dsts[to_all ? r : 0], src, rank.fetches, rank.fault);
    fetch.last_pair = rank.list.last_entries;
    fetch.last_batch = rank.list.last_entries + 3;
    fetch.intact = &intact;
    fetch.num_shifts = 1;
    for (u32 k = 1; to_all && k < num_ranks; ++k) {
      fetch.shifts[fetch.num_shifts++] = dsts[(r + k) % num_ranks].row(0) - fetch.dst;
    }
    run_large<Copy>(2, fetch, random);
    fetch.src = fetch.dst;
    fetch.pairs = rank.copies.data();
    fetch.last_batch = nullptr;
    fetch.last_pair = rank.list.last_entries + 1;
    fetch.num_src_rows = call.dst_rows;
    fetch.num_shifts = 1;
    calls.push_back(fetch);
  }
  for (u32 r = 0; to_all && r < num_ranks; ++r) {  // all fetches are through by then
    run_large<Copy>(3, calls[r], random);
  }
  for (auto& dst : dsts) dst.check();
  src.check();
  for (auto& rank : ranks) rank.fault.check();
}

}  // namespace emulate

int main() {
  using namespace emulate;
  rounds("peer_lists", 120, [&](Random& random, int) {
    one_run<i32, kHostSource>(random);
    one_run<i64, kHostSource>(random);
    one_run<i32, kHostTarget>(random);
    one_run<i64, kHostTarget>(random);
  });
}
