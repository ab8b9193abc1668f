// ResidencyMap on the device: finds the rows of each list in its state's slots, gives the missing
// ones the least recently used slots, and fetches them, in one launch.
//
// A cluster of blocks serves a list (gridDim.x; compute capability 9.0 and up, elsewhere one
// block). Each block looks up all rows of the list and finds the victims. Each writes a share of
// the new order: the blocks tell each other how many slots of their shares the step does not use.
// The fetch begins as soon as the misses are known.
//
// After sglang's hisparse.cuh: the same order of slots after a step.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "residency.cuh"

namespace jitkern {

template <int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy, bool kUsePdl,
          int kInFlight>
class SwapIn {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024,
                "whole warps; a lane adds the totals of one");

 public:
  using Params = ResidencyParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const Cluster cluster = Cluster::here();
    const ResidencyShared shared(shared_memory(), p.table_size, p.length, p.state.num_slots,
                                 p.pages != nullptr);
    for (u32 i = threadIdx.x; i < p.table_size; i += kThreads) {
      shared.keys[i] = kNoRow;
      shared.firsts[i] = kNoPosition;
    }
    for (i32 i = thread(); i < (p.state.num_slots + 31) / 32; i += kThreads) shared.used[i] = 0;
    cluster.arrive();
    __syncthreads();
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    const i32 list = static_cast<i32>(blockIdx.y);
    const i64 state = state_of(p, list);
    if (state < 0) return refuse(p, cluster, list);
    SwapIn(p, cluster, shared, list, state).serve();
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  // Steps of 32 rows, and slots, that a warp holds in registers: 2,048 a block. With 8,192 slots
  // the kernel has 2,560 instructions instead of 1,590, most of which run once in a launch.
  static constexpr int kRowsAhead = 64 / kWarps, kSlotsAhead = 64 / kWarps;

  static constexpr i32 kNoRow = -1;
  static constexpr i32 kNoPosition = 0x7fffffff;
  static constexpr i32 kFirstMiss = 1 << 30;  // kFirstMiss + m in the table: miss m
  // What is found for a position: a slot, nothing, or kInCell - its cell in the table.
  static constexpr i32 kPadding = -1, kInCell = -2;

  // `stale` is the block's share of the order, `front` its first slots, the others the whole list.
  struct Totals {
    i32 asked;
    i32 missed;
    i32 stale;
    i32 front;
  };

  const Params& p;
  const ResidencyState& s;
  const Cluster cluster;
  const ResidencyShared shared;
  const i32 list;
  const i64 state;
  i32* const slot_of_row;
  i32* const row_of_slot;
  i32* const order_of_state;
  WarpShare<Int, kRowsAhead> rows;
  WarpShare<i32, kSlotsAhead> order;
  const i32 front_slot;    // this thread's among the first of the order
  const i64 count_before;  // before the call; in the first three threads

  // Begins all loads that need nothing but the number of the state.
  __device__ SwapIn(const Params& p, const Cluster& cluster, const ResidencyShared& shared,
                    i32 list, i64 state)
      : p(p),
        s(p.state),
        cluster(cluster),
        shared(shared),
        list(list),
        state(state),
        slot_of_row(s.slot_of_row + state * s.num_rows),
        row_of_slot(s.row_of_slot + state * s.num_slots),
        order_of_state(s.order + state * s.num_evictable),
        rows(static_cast<const Int*>(p.rows) + i64(list) * p.length, p.length, warp(), kWarps),
        order(order_of_state, s.num_evictable, static_cast<i32>(cluster.rank) * kWarps + warp(),
              static_cast<i32>(cluster.size) * kWarps),
        front_slot(thread() < s.num_evictable ? order_of_state[thread()] : -1),
        count_before(thread() < 3 ? s.counts[3 * state + thread()] : 0) {}

  __device__ void serve() {
    const i32 num_asked = look_up();
    if (num_asked < 0) return refuse(p, cluster, list);

    // The misses in the order of the list, and how many slots this step does not use: in the
    // block's share of the order, and among its first kThreads slots.
    const auto is_first_miss = [&](i32 at, Int) {
      const i32 found = shared.found[at];
      return found <= kInCell && shared.firsts[kInCell - found] == at;
    };
    const auto is_stale = [&](i32, i32 slot) { return this->is_stale(slot); };
    const u32 front = __ballot_sync(kFullWarp, this->is_stale(front_slot));
    Totals totals{num_asked, rows.mark(is_first_miss), order.mark(is_stale), __popc(front)};
    const Totals before = add_lower_warps(totals);
    const i32 num_missed = totals.missed;
    cluster.wait();  // all blocks have started
    if (threadIdx.x < cluster.size) {
      cluster.peer(shared.stale_of_block, threadIdx.x)[cluster.rank] = totals.stale;
    }
    bool is_wrong = false;
    if (num_missed > 0) {
      rows.for_ranks(before.missed, is_first_miss, [&](i32 at, Int row, i32 miss, bool is_first) {
        if (!is_first) return;
        // A long list is read again here, and may have changed: the map has no other rows.
        shared.missed[miss] = row >= 0 && row < s.num_rows ? static_cast<i32>(row) : 0;
        if (p.pages != nullptr) {
          const i32 host_row = host_row_of(shared.missed[miss]);
          shared.host_rows[miss] = host_row;
          is_wrong |= host_row < 0;
        }
        shared.firsts[kInCell - shared.found[at]] = kFirstMiss + miss;
      });
      if (totals.front < num_missed) search_victims(num_missed, totals.front);
    }
    cluster.arrive();  // this block has read the state
    Fetch<kVecBytes, kInFlight> fetch(p, shared, state * s.num_slots, num_missed, cluster);
    if (num_missed > 0) {
      if (__syncthreads_or(is_wrong)) {
        cluster.wait();  // until then other blocks write to the memory of this one
        return fill(p, list);
      }
      fetch.load();
      take_victims(num_missed, before.front, front, front_slot);
      __syncthreads();  // the cluster's barrier does not order what follows arrive()
    }
    cluster.wait();
    const i32 of_block =
        lane() < static_cast<i32>(cluster.size) ? shared.stale_of_block[lane()] : 0;
    const bool is_before = lane() < static_cast<i32>(cluster.rank);
    const i32 num_stale = warp_sum(of_block);
    const i32 first_stale = before.stale + warp_sum(is_before ? of_block : 0);
    if (num_missed > num_stale) {
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        report_fault(p.fault, p.length_site, list, num_missed, num_stale + 1);
      }
      return fill(p, list);
    }

    // The new order: slots that are not used, the misses, the hits in their old order. In place,
    // unless a part of the old order is still to be read.
    const bool is_long = order.steps > kSlotsAhead;
    i32* const new_order = is_long ? s.next_order + state * s.num_evictable : order_of_state;
    order.for_ranks(first_stale, is_stale, [&](i32 at, i32 slot, i32 rank, bool is_free) {
      const bool is_victim = is_free && rank < num_missed;
      const i32 place = is_victim ? num_stale - num_missed + rank
                        : is_free ? rank - num_missed
                                  : num_stale + at - rank;
      new_order[place] = slot;
    });
    write_misses(num_missed);
    if (cluster.rank == 0) write_counts(totals);
    write_slots();
    if (p.plan_counts != nullptr) write_plan(num_missed);
    fetch.store_all();
    if (is_long) {
      cluster.sync();
      for (i32 at = place_in_list(); at < s.num_evictable; at += threads_of_list()) {
        order_of_state[at] = new_order[at];
      }
    }
  }

  static __device__ i32 thread() { return static_cast<i32>(threadIdx.x); }
  static __device__ i32 lane() { return thread() % 32; }
  static __device__ i32 warp() { return thread() / 32; }
  // The blocks of a list share its outputs.
  static __device__ i32 place_in_list() {
    return static_cast<i32>(blockIdx.x) * kThreads + thread();
  }
  static __device__ i32 threads_of_list() { return static_cast<i32>(gridDim.x) * kThreads; }

  static __device__ i64 int_at(const void* items, i32 bytes, i64 i) {
    return bytes == 4 ? i64(static_cast<const i32*>(items)[i]) : static_cast<const i64*>(items)[i];
  }

  // The state of a list; -1 if it has none.
  static __device__ i64 state_of(const Params& p, i32 list) {
    const i64 count = p.count == nullptr ? p.num_lists : int_at(p.count, p.count_bytes, 0);
    const i64 state = p.states == nullptr ? list : int_at(p.states, p.states_bytes, list);
    if (list >= count || state < 0) return -1;
    if (state < p.state.num_states) return state;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      report_fault(p.fault, p.states_site, list, state, p.state.num_states);
    }
    return -1;
  }

  // -- rows to slots

  // Finds the slot of each row of the list, or its cell in a table of the missing rows, with its
  // first position. Returns how many rows the warp's share asks for; -1 if the list is wrong.
  __device__ i32 look_up() {
    i32 slots[kRowsAhead];  // all are loaded before one is used
#pragma unroll
    for (int step = 0; step < kRowsAhead; ++step) {
      const Int row = rows.ahead[step];
      slots[step] = row >= 0 && row < s.num_rows ? slot_of_row[row] : -1;
    }
    const bool is_twice = is_asked_twice();
    i32 wrong_at = -1, num_asked = 0, step = 0;
    rows.for_each([&](i32 at, Int row, bool inside) {
      i32 found = kPadding;
      if (inside && row >= s.num_rows) {
        wrong_at = at;
      } else if (inside && row >= 0) {
        ++num_asked;
        found = step < kRowsAhead ? slots[step] : slot_of_row[row];
        if (u32(found) < u32(s.num_slots)) {
          atomicOr(&shared.used[found / 32], 1u << found % 32);
        } else {
          const u32 cell = insert(static_cast<i32>(row));
          atomicMin(&shared.firsts[cell], at);
          found = kInCell - static_cast<i32>(cell);
        }
      }
      ++step;
      if (inside) shared.found[at] = found;
    });
    if (!__syncthreads_or(is_twice || wrong_at >= 0)) return warp_sum(num_asked);
    if (wrong_at >= 0 && blockIdx.x == 0) {
      const i64 place = i64(list) * p.length + wrong_at;
      report_fault(p.fault, p.rows_site, place, static_cast<const Int*>(p.rows)[place], s.num_rows);
    }
    return -1;
  }

  // Whether another list has this state: each would take the other's slots.
  __device__ bool is_asked_twice() const {
    if (p.states == nullptr) return false;
    const i64 count = p.count == nullptr ? p.num_lists : int_at(p.count, p.count_bytes, 0);
    bool is_twice = false;
    for (i32 i = thread(); i < p.num_lists && i < count; i += kThreads) {
      if (i == list || int_at(p.states, p.states_bytes, i) != state) continue;
      is_twice = true;
      if (blockIdx.x == 0) report_fault(p.fault, p.twice_site, list, state, i);
    }
    return is_twice;
  }

  __device__ u32 insert(i32 row) const {
    u32 cell = static_cast<u32>(u64(u32(row) * 0x9e3779b1u) * p.table_size >> 32);
    while (true) {
      const i32 key = atomicCAS(&shared.keys[cell], kNoRow, row);
      if (key == kNoRow || key == row) return cell;
      cell = cell + 1 == p.table_size ? 0 : cell + 1;
    }
  }

  // The row of the host by the table of pages; -1 if the host has no such page.
  __device__ i32 host_row_of(i32 row) const {
    const i32 page = static_cast<i32>(p.page.quotient(static_cast<u32>(row)));
    const i32 page_rows = static_cast<i32>(p.page.value);
    const i64 place = state * p.num_pages + page;
    const i64 host_page = int_at(p.pages, p.pages_bytes, place);
    if (host_page >= 0 && host_page < p.num_host_pages) {
      return static_cast<i32>(host_page * page_rows) + row - page * page_rows;
    }
    if (blockIdx.x == 0) report_fault(p.fault, p.pages_site, place, host_page, p.num_host_pages);
    return -1;
  }

  // -- victims

  // Whether this step does not use the slot.
  __device__ bool is_stale(i32 slot) const {
    return u32(slot) < u32(s.num_slots) && (shared.used[slot / 32] >> slot % 32 & 1) == 0;
  }

  // Replaces a warp's totals by those of the block; returns those of the warps below.
  __device__ Totals add_lower_warps(Totals& totals) const {
    Totals* const of_warp = reinterpret_cast<Totals*>(shared.of_warp);
    if (lane() == 0) of_warp[warp()] = totals;
    __syncthreads();
    const Totals other = lane() < kWarps ? of_warp[lane()] : Totals{};
    const bool is_below = lane() < warp();
    totals = {warp_sum(other.asked), warp_sum(other.missed), warp_sum(other.stale),
              warp_sum(other.front)};
    return {0, warp_sum(is_below ? other.missed : 0), warp_sum(is_below ? other.stale : 0),
            warp_sum(is_below ? other.front : 0)};
  }

  // Slots whose bit is set are victims number `first` and on.
  __device__ void take_victims(i32 num_missed, i32 first, u32 ballot, i32 slot) const {
    const i32 victim = first + rank_in(ballot);
    if ((ballot >> lane() & 1) && victim < num_missed) shared.victims[victim] = slot;
  }

  // Takes victims behind the first kThreads slots of the order, which had only `num_found`.
  __device__ void search_victims(i32 num_missed, i32 num_found) const {
    for (i32 first = kThreads; num_found < num_missed && first < s.num_evictable;
         first += kThreads) {
      const i32 at = first + thread();
      const i32 slot = at < s.num_evictable ? order_of_state[at] : -1;
      const u32 ballot = __ballot_sync(kFullWarp, is_stale(slot));
      Totals more{0, 0, 0, __popc(ballot)};
      __syncthreads();  // the totals of warps have been read
      const Totals below = add_lower_warps(more);
      take_victims(num_missed, num_found + below.front, ballot, slot);
      num_found += more.front;
    }
  }

  // -- the new state

  __device__ void write_misses(i32 num_missed) const {
    for (i32 miss = place_in_list(); miss < num_missed; miss += threads_of_list()) {
      const i32 slot = shared.victims[miss], new_row = shared.missed[miss];
      const i32 old_row = row_of_slot[slot];
      if (u32(old_row) < u32(s.num_rows)) slot_of_row[old_row] = -1;
      slot_of_row[new_row] = slot;
      row_of_slot[slot] = new_row;
    }
  }

  // Adds to the numbers of hits, misses and bytes.
  __device__ void write_counts(const Totals& totals) const {
    if (thread() >= 3) return;
    const i64 misses = totals.missed;
    const i64 more = thread() == 0   ? totals.asked - misses
                     : thread() == 1 ? misses
                                     : misses * p.row_bytes;
    s.counts[3 * state + thread()] = count_before + more;
    s.host_counts[3 * state + thread()] = count_before + more;
  }

  // -- outputs

  // Leaves in step with the cluster's other blocks: a list that changes meanwhile may be right for
  // them, and they write to the memory of this one.
  static __device__ void refuse(const Params& p, const Cluster& cluster, i32 list) {
    cluster.wait();
    cluster.sync();
    fill(p, list);
  }

  // The outputs of a list that is not served.
  static __device__ void fill(const Params& p, i32 list) {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      const i64 place = i64(list) * p.length + at;
      static_cast<Int*>(p.slots_out)[place] = -1;
      if (p.plan_counts != nullptr) set_pair(p, place, -1, -1);
    }
    if (p.plan_counts != nullptr && blockIdx.x == 0 && threadIdx.x == 0) p.plan_counts[list] = 0;
  }

  static __device__ void set_pair(const Params& p, i64 place, i64 row, i64 cache_row) {
    Int* const pair = static_cast<Int*>(p.plan_pairs) + 2 * place;
    pair[0] = static_cast<Int>(row);
    pair[1] = static_cast<Int>(cache_row);
  }

  __device__ void write_slots() const {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      i32 found = shared.found[at];
      if (found <= kInCell) found = shared.victims[shared.firsts[kInCell - found] - kFirstMiss];
      static_cast<Int*>(p.slots_out)[i64(list) * p.length + at] =
          static_cast<Int>(found == kPadding ? -1 : state * s.num_slots + found);
    }
  }

  __device__ void write_plan(i32 num_missed) const {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      const bool is_miss = at < num_missed;
      set_pair(p, i64(list) * p.length + at, is_miss ? shared.host_rows[at] : -1,
               is_miss ? state * s.num_slots + shared.victims[at] : -1);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) p.plan_counts[list] = num_missed;
  }
};

}  // namespace jitkern
