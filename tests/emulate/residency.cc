// ResidencyMap's kernel: clusters of 1 to 8 blocks, states of any content, lists with repeats,
// padding and faults, layers and pages; against exact LRU.
#include "offload/residency.cu"

#include <map>
#include <set>

#include "sweep.h"

namespace emulate {

constexpr FaultSite kRows{3}, kLength{4}, kStates{5}, kTwice{6}, kPage{7};
constexpr i64 kUnwritten = 77;

struct Kernel {
  int vec_bytes, index_bytes, num_threads;
  void (*run)(const ResidencyParams&);
};

constexpr Config kConfig{RESIDENCY_CONFIG};

template <int kVecBytes, int kIndexBytes, int kThreads>
Kernel kernel() {
  using Swap = SwapIn<kVecBytes, kIndexBytes, kThreads, kConfig.max_occupancy, kConfig.use_pdl,
                      RESIDENCY_IN_FLIGHT>;
  return {kVecBytes, kIndexBytes, kThreads, Swap::run};
}

// A buffer per layer. Rows are parts of blocks, whose blocks or parts are neighbours.
struct Side {
  i64 num_parts, num_blocks;
  bool parts_first;
  std::vector<RowBuffer> buffers;
  std::vector<BufferEntry> entries;

  Side(const char* name, i64 num_rows, const std::vector<i64>& row_bytes, int vec_bytes,
       Random& random)
      : num_parts(row_bytes.size() > 1 ? random.pick({1, 2, 3}) : 1),
        num_blocks(ceil_div(num_rows, num_parts)),
        parts_first(random.below(2) == 0) {
    for (const i64 bytes : row_bytes) {
      const Placement at = any_placement(bytes, vec_bytes, random);
      RowBuffer& buffer = buffers.emplace_back(name, num_blocks * num_parts, bytes, at, random);
      const i64 stride = buffer.stride_bytes();
      entries.push_back({reinterpret_cast<u64>(buffer.row(0)),
                         parts_first ? num_parts * stride : stride,
                         parts_first ? stride : num_blocks * stride, bytes});
    }
  }

  i64 place(i64 row) const {
    return parts_first ? row : row % num_parts * num_blocks + row / num_parts;
  }
  BlockSide params() const {
    BlockSide side{};
    if (!entries.empty()) side.first = entries[0];
    if (entries.size() > 1) side.table = entries.data();
    side.num_parts = static_cast<u32>(num_parts);
    return side;
  }
};

// A state before a call; step() is exact LRU.
struct State {
  std::vector<i64> order;
  std::map<i64, i64> slot_of_row;

  State(i64 num_slots, i64 num_evictable, i64 num_rows, Random& random)
      : order(random.distinct(num_evictable, num_evictable)) {
    const i64 most = random.pick({1, 4, 100});  // of `most` slots one is empty
    i64 slot = 0;
    for (const i64 row : random.distinct(std::min(num_slots, num_rows), num_rows)) {
      if (random.below(most) != 0) slot_of_row[row] = slot;
      ++slot;
    }
  }

  // Rows of which at most `most` are distinct: held ones, others, repeats and padding.
  void add_list(std::vector<i64>& lists, i64 length, i64 most, i64 num_rows, Random& random) const {
    std::vector<i64> distinct = {-1}, held;
    for (const auto& [row, slot] : slot_of_row) held.push_back(row);
    const i64 hits = held.empty() ? 0 : random.pick({0, 1, 2, 2, 3});  // of three
    for (i64 i = 0; i < most; ++i) {
      const bool is_hit = random.below(3) < hits;
      distinct.push_back(is_hit ? held[random.below(i64(held.size()))] : random.below(num_rows));
    }
    const i64 count = i64(distinct.size()), repeats = random.below(2);
    for (i64 i = 0; i < length; ++i) {
      lists.push_back(distinct[repeats != 0 ? random.below(count) : i % count]);
    }
  }

  struct Step {
    std::vector<i64> slots, order, missed, victims;
    i64 num_asked = 0, num_stale = 0;
  };
  Step step(const std::vector<i64>& list) const {
    Step step;
    std::map<i64, i64> after = slot_of_row;
    std::set<i64> used;
    for (const i64 row : list) {
      if (row < 0) continue;
      ++step.num_asked;
      const auto [at, is_new] = after.emplace(row, -1);
      if (is_new) step.missed.push_back(row);
      used.insert(at->second);
    }
    std::vector<i64> hits;
    for (const i64 slot : order) (used.count(slot) ? hits : step.order).push_back(slot);
    step.num_stale = i64(step.order.size());
    if (step.missed.size() > step.order.size()) return step;
    const auto end = step.order.begin() + i64(step.missed.size());
    step.victims.assign(step.order.begin(), end);
    std::rotate(step.order.begin(), end, step.order.end());
    for (size_t i = 0; i < step.missed.size(); ++i) after[step.missed[i]] = step.victims[i];
    step.order.insert(step.order.end(), hits.begin(), hits.end());
    for (const i64 row : list) step.slots.push_back(row < 0 ? -1 : after[row]);
    return step;
  }
};

// Sizes about those of a warp, a block, and what a block holds in registers.
i32 any_size(bool is_long, Random& random) {
  const i32 ahead = RESIDENCY_HELD_SLOTS, most = is_long ? 2 * ahead + 100 : 300;
  const i32 any = 1 + static_cast<i32>(random.below(most));
  if (is_long) return random.pick({ahead, ahead + 1, any, most});
  return random.pick({1, 7, 33, 64, any, most});
}

void one_run(const Kernel& kernel, Random& random) {
  const bool is_long = random.below(20) == 0;
  const i32 num_slots = any_size(is_long, random);
  const i32 num_pinned = random.below(3) == 0 ? static_cast<i32>(random.below(num_slots + 1)) : 0;
  const i32 num_evictable = num_slots - num_pinned, page = random.pick({1, 2, 7});
  const i32 num_pages = random.pick({num_slots, num_slots / 2 + 1, 2 * num_slots + 500}) / page + 1;
  const i32 num_rows = num_pages * page, num_states = random.pick({1, 2, 3});
  const i32 num_lists = is_long ? 1 : random.pick({1, 2, 3, 4});
  const i32 length = random.pick({any_size(is_long, random), num_slots, num_slots / 2});
  std::vector<i64> row_bytes(random.pick({0, 1, 1, 1, 2, 3}));
  for (i64& bytes : row_bytes) bytes = kernel.vec_bytes * random.pick({i64(1), random.below(200)});
  const bool has_pages = random.below(3) == 0;
  const i64 num_host_pages = has_pages ? 1 + random.below(num_pages) : num_pages;
  Side host("host", num_host_pages * page, row_bytes, kernel.vec_bytes, random);
  Side cache("cache", num_states * num_slots, row_bytes, kernel.vec_bytes, random);

  std::vector<State> states;
  std::vector<i64> slots(num_states * num_rows, -1), held(num_states * num_slots, -1), orders;
  std::vector<i64> page_of(num_states * num_pages);
  for (i64& number : page_of) number = random.below(num_host_pages);
  const int states_bytes = random.pick({4, 8}), count_bytes = random.pick({0, 0, 4, 8});
  if (random.below(3) == 0) spoil(page_of, num_host_pages, states_bytes, random);
  for (i32 i = 0; i < num_states; ++i) {
    const State& state = states.emplace_back(num_slots, num_evictable, num_rows, random);
    orders.insert(orders.end(), state.order.begin(), state.order.end());
    for (const auto& [row, slot] : state.slot_of_row) {
      slots[i * num_rows + row] = slot;
      held[i * num_slots + slot] = row;
    }
  }
  IntBuffer slot_of_row("slot_of_row", slots, 4), row_of_slot("row_of_slot", held, 4);
  IntBuffer order("order", orders, 4), next_order("next_order", orders, 4);
  IntBuffer counts("counts", 3 * num_states, random.below(1000), 8);
  IntBuffer host_counts("host_counts", 3 * num_states, kUnwritten, 8);
  IntBuffer pages("pages", page_of, states_bytes);

  // Each state once, but for mistakes.
  const bool has_states = num_lists > num_states || random.below(2) == 0;
  std::vector<i64> state_of = random.distinct(num_states, num_states), asked;
  state_of.resize(num_lists, -1);
  if (random.below(3) == 0) {
    const i64 other = state_of[random.below(num_lists)];
    state_of[random.below(num_lists)] = random.pick({other, other, i64(num_states), i64(-1)});
  }
  for (i32 list = 0; list < num_lists; ++list) {
    const i64 any = random.below(num_evictable + 1);
    const i64 most = random.below(8) == 0 ? length : random.pick({any, i64(num_evictable)});
    const State& like = states[std::max<i64>(has_states ? state_of[list] : list, 0) % num_states];
    like.add_list(asked, length, most, num_rows, random);
  }
  if (random.below(5) == 0 && length > 0) spoil(asked, num_rows, kernel.index_bytes, random);
  IntBuffer rows("rows", asked, kernel.index_bytes), list_states("states", state_of, states_bytes);
  IntBuffer count("count", 1, random.below(num_lists + 3) - 1, count_bytes == 4 ? 4 : 8);
  IntBuffer slots_out("slots_out", num_lists * length, kUnwritten, kernel.index_bytes);
  IntBuffer pairs("plan.pairs", 2 * num_lists * length, kUnwritten, kernel.index_bytes);
  IntBuffer num_missed("plan.counts", num_lists, kUnwritten, 4);
  const bool has_plan = random.below(3) != 0;
  FaultWord fault(random.pick({0u, 0u, 0u, 1u, 2u}));

  ResidencyParams p{};
  const auto i32s = [](IntBuffer& buffer) { return static_cast<i32*>(buffer.data()); };
  const auto i64s = [](IntBuffer& buffer) { return static_cast<i64*>(buffer.data()); };
  // The host makes it for orders that a block alone does not hold in registers.
  i32* const spare = num_evictable > RESIDENCY_HELD_SLOTS ? i32s(next_order) : nullptr;
  p.state = {i32s(slot_of_row), i32s(row_of_slot), i32s(order), spare,         i64s(counts),
             i64s(host_counts), num_states,        num_slots,   num_evictable, num_rows};
  p.host = host.params(), p.cache = cache.params();
  p.num_layers = static_cast<u32>(row_bytes.size());
  i64 longest = 0;
  for (const i64 bytes : row_bytes) p.row_bytes += bytes, longest = std::max(longest, bytes);
  const i64 segments = segments_of(longest, 128 - kernel.vec_bytes, kernel.vec_bytes);
  p.segments = Divisor::of(static_cast<u32>(segments)), p.page = Divisor::of(page);
  p.rows = rows.data(), p.slots_out = slots_out.data();
  if (has_plan) p.plan_pairs = pairs.data(), p.plan_counts = i32s(num_missed);
  if (has_states) p.states = list_states.data(), p.states_bytes = states_bytes;
  if (has_pages) p.pages = pages.data(), p.pages_bytes = states_bytes;
  if (count_bytes != 0) p.count = count.data(), p.count_bytes = count_bytes;
  p.num_pages = num_pages, p.num_host_pages = num_host_pages;
  p.num_lists = num_lists, p.length = length, p.table_size = static_cast<u32>(2 * length + 2);
  p.rows_site = kRows, p.length_site = kLength, p.states_site = kStates;
  p.twice_site = kTwice, p.pages_site = kPage, p.fault = fault.record();

  const i64 num_used = count_bytes != 0 ? std::min<i64>(count.at(0), num_lists) : num_lists;
  const auto host_row_of = [&](i64 state, i64 row) {
    return has_pages ? pages.at(state * num_pages + row / page) * page + row % page : row;
  };
  for (i32 list = 0; list < num_lists; ++list) {
    const i64 state = has_states ? state_of[list] : list, first_slot = state * num_slots;
    const i64 first = i64(list) * length;
    State::Step step;
    bool is_served = list < num_used && state >= 0;
    const auto expect_fault = [&](FaultSite site, i64 position, i64 value, i64 bound) {
      fault.expect(site, position, value, bound);
      is_served = false;
    };
    if (is_served && state >= num_states) expect_fault(kStates, list, state, num_states);
    if (is_served) {
      for (i32 i = 0; has_states && i < num_used; ++i) {
        if (i != list && state_of[i] == state) expect_fault(kTwice, list, state, i);
      }
      for (i64 i = first; i < first + length; ++i) {
        if (rows.at(i) >= num_rows) expect_fault(kRows, i, rows.at(i), num_rows);
      }
    }
    const auto begin = asked.begin() + first;
    if (is_served) step = states[state].step({begin, begin + length});
    for (const i64 row : step.missed) {
      const i64 at = state * num_pages + row / page;
      if (!has_pages || (pages.at(at) >= 0 && pages.at(at) < num_host_pages)) continue;
      expect_fault(kPage, at, pages.at(at), num_host_pages);
    }
    const i64 missed = i64(step.missed.size());
    if (is_served && missed > step.num_stale)
      expect_fault(kLength, list, missed, step.num_stale + 1);
    for (i64 i = 0; i < length; ++i) {
      const i64 slot = is_served ? step.slots[i] : -1;
      const bool is_miss = is_served && i < missed;
      slots_out.expect(first + i, slot < 0 ? -1 : first_slot + slot);
      if (!has_plan) continue;
      pairs.expect(2 * (first + i), is_miss ? host_row_of(state, step.missed[i]) : -1);
      pairs.expect(2 * (first + i) + 1, is_miss ? first_slot + step.victims[i] : -1);
    }
    if (has_plan) num_missed.expect(list, is_served ? missed : 0);
    if (!is_served) continue;
    const i64 more[] = {step.num_asked - missed, missed, missed * p.row_bytes};
    for (i64 i = 0; i < 3; ++i) {
      const i64 sum = counts.at(3 * state + i) + more[i];
      counts.expect(3 * state + i, sum), host_counts.expect(3 * state + i, sum);
    }
    for (i64 i = 0; i < num_evictable; ++i) order.expect(state * num_evictable + i, step.order[i]);
    for (i64 i = 0; i < missed; ++i) {
      const i64 row = step.missed[i], slot = step.victims[i];
      const i64 old = row_of_slot.at(first_slot + slot);
      if (old >= 0) slot_of_row.expect(state * num_rows + old, -1);
      slot_of_row.expect(state * num_rows + row, slot);
      row_of_slot.expect(first_slot + slot, row);
      for (size_t layer = 0; layer < row_bytes.size(); ++layer) {
        std::memcpy(cache.buffers[layer].expected(cache.place(first_slot + slot)),
                    host.buffers[layer].row(host.place(host_row_of(state, row))), row_bytes[layer]);
      }
    }
  }

  const unsigned most_blocks = kernel.num_threads > 128 ? 2 : kMostBlocksOfCluster;
  const unsigned blocks = std::min(random.pick({1u, 1u, 1u, 2u, 4u, 8u}), most_blocks);
  num_shared_bytes = ResidencyShared(nullptr, p.table_size, length, num_slots, has_pages).bytes;
  launch_groups({blocks, unsigned(num_lists)}, {unsigned(kernel.num_threads)}, blocks,
                random.pick({any_order(random), Order::kUneven}), [&] { kernel.run(p); });
  for (Side* side : {&host, &cache}) {
    for (RowBuffer& buffer : side->buffers) buffer.check();
  }
  check_all(rows, list_states, count, fault, slots_out, pairs, num_missed, slot_of_row, row_of_slot,
            order, counts, host_counts, pages);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  const std::vector<Kernel> kernels = {
      kernel<16, 4, 64>(), kernel<4, 8, 128>(),
#ifndef SWEEP_FEW
      kernel<1, 8, 64>(),  kernel<8, 4, 64>(),  kernel<16, 8, kConfig.num_threads>(),
#endif
  };
  rounds("residency", 300,
         [&](Random& random, int run) { one_run(kernels[run % kernels.size()], random); });
}
