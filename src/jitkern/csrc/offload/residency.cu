// ResidencyMap on the device: finds the rows of each list in its state's slots, gives the missing
// ones the least recently used slots, and fetches them, in one launch.
//
// A cluster of blocks serves a list (gridDim.x; compute capability 9.0 and up, elsewhere one
// block). Each block looks up all rows of the list, and a share of the order of the slots. The
// blocks tell each other the victims in each other's shared memory. Fetches over the link begin as
// soon as the misses are known, while victims are chosen.
//
// After sglang's hisparse.cuh: the same order of slots after a step.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "cluster.cuh"
#include "residency.h"

namespace jitkern {

constexpr u32 kFullWarp = 0xffffffffu;

// The number of lanes below this one whose bit is set.
__device__ inline i32 rank_in(u32 ballot) {
  return __popc(ballot & ((1u << threadIdx.x % 32) - 1u));
}

// The sum over the lanes of a warp.
__device__ inline i32 warp_sum(i32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return static_cast<i32>(__reduce_add_sync(kFullWarp, static_cast<u32>(value)));
#else
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(kFullWarp, value, bits);
  return value;
#endif
}

// A warp's share of an array, 32 items a step. The first kAhead steps are held in registers.
template <class T, int kAhead>
struct WarpShare {
  const T* items;
  i32 begin;  // a multiple of 32
  i32 end;
  i32 steps;
  T ahead[kAhead];
  u32 marked[kAhead];  // by mark()

  // `warp` of `num_warps`, which share the array.
  __device__ WarpShare(const T* items, i32 count, i32 warp, i32 num_warps) : items(items) {
    steps = (count + 32 * num_warps - 1) / (32 * num_warps);
    begin = warp * steps * 32;
    end = begin + steps * 32 < count ? begin + steps * 32 : count;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const i32 at = place(step);
      ahead[step] = at < end ? items[at] : T(-1);
    }
  }

  __device__ i32 place(int step) const {
    return begin + step * 32 + static_cast<i32>(threadIdx.x % 32);
  }

  // Calls use(position, item, whether it is inside) in each lane, in whole warps.
  template <class Use>
  __device__ void for_each(const Use& use) const {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (begin + step * 32 < end) use(place(step), ahead[step], place(step) < end);
    }
    for_others(use);
  }

  // Marks the items for which is_it(position, item) holds; returns their number in the warp.
  template <class Is>
  __device__ i32 mark(const Is& is_it) {
    i32 count = 0;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      marked[step] = 0;
      if (begin + step * 32 >= end) continue;
      const bool is = place(step) < end && is_it(place(step), ahead[step]);
      marked[step] = __ballot_sync(kFullWarp, is);
      count += __popc(marked[step]);
    }
    for_others([&](i32 at, T item, bool inside) {
      count += __popc(__ballot_sync(kFullWarp, inside && is_it(at, item)));
    });
    return count;
  }

  // Calls use(position, item, its rank, whether it is marked) for all items. The rank counts marked
  // items before it, from `rank` on.
  template <class Is, class Use>
  __device__ void for_ranks(i32 rank, const Is& is_it, const Use& use) const {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (begin + step * 32 >= end) continue;
      const u32 ballot = marked[step];
      const bool is = ballot >> threadIdx.x % 32 & 1;
      if (place(step) < end) use(place(step), ahead[step], rank + rank_in(ballot), is);
      rank += __popc(ballot);
    }
    for_others([&](i32 at, T item, bool inside) {
      const bool is = inside && is_it(at, item);
      const u32 ballot = __ballot_sync(kFullWarp, is);
      if (inside) use(at, item, rank + rank_in(ballot), is);
      rank += __popc(ballot);
    });
  }

 private:
  template <class Use>
  __device__ void for_others(const Use& use) const {
#pragma unroll 1
    for (i32 first = begin + kAhead * 32; first < end; first += 32) {
      const i32 at = first + static_cast<i32>(threadIdx.x % 32);
      use(at, at < end ? items[at] : T(-1), at < end);
    }
  }
};

// The fetch of the missing rows. A row is cut into segments of one vector per lane, which begin at
// the 128-byte line in which the row begins, so that no read over the link is split. A warp loads
// kInFlight segments before it stores the first.
template <int kVecBytes, int kInFlight>
class Fetch {
 public:
  __device__ Fetch(const ResidencyParams& p, const ResidencyShared& shared, i32 num_missed,
                   const Cluster& cluster)
      : p_(p),
        shared_(shared),
        num_missed_(static_cast<u32>(num_missed)),
        num_segments_(num_missed_ * p.num_layers * p.segments),
        step_(cluster.size * (blockDim.x / kWarpLanes) * kInFlight),
        // The last warps begin: the first ones write the state, and would wait for these loads.
        first_(((blockDim.x - 1 - threadIdx.x) / kWarpLanes * cluster.size + cluster.rank) *
               kInFlight) {}

  // Begins the loads of the warp's first segments. Their slots need not be known.
  __device__ void load() {
    if (first_ >= num_segments_) return;
    own_ = segment_of_lane();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const char* const source = from_lane(own_.source, i);
      if (is_inside(from_lane(own_.range, i))) value_[i] = load_vec<kVecBytes>(source + offset());
    }
  }

  // Stores them, then fetches the others.
  __device__ void store_all(i64 first_row) {
    while (first_ < num_segments_) {
      char* const target = own_.range == 0 ? nullptr : target_of(first_row);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        char* const at = from_lane(target, i);
        if (is_inside(from_lane(own_.range, i))) store_vec<kVecBytes>(at + offset(), value_[i]);
      }
      first_ += step_;
      load();
    }
  }

 private:
  struct Segment {
    const char* source;  // its first byte, which may lie before the row
    u32 range;           // its bytes in the row: the first, and the end shifted by 16
    u32 row;             // layer * num_missed + number of the miss
    i32 at;              // of its first byte in the row
  };

  // Each of the first kInFlight lanes computes one segment.
  __device__ Segment segment_of_lane() const {
    const u32 lane = threadIdx.x % kWarpLanes, number = first_ + lane;
    if (lane >= kInFlight || number >= num_segments_) return {};
    const u32 row = number / p_.segments;
    const u32 layer = layer_of(row);
    const BufferEntry& entry = entry_of(p_.host, layer);
    const char* const source =
        address_of(p_.host, entry, shared_.missed[row - layer * num_missed_]);
    const i32 lead = static_cast<i32>(reinterpret_cast<u64>(source) % kHostLineBytes);
    const i32 at = static_cast<i32>(number - row * p_.segments) * kSegmentBytes - lead;
    const i32 left = static_cast<i32>(entry.piece_bytes) - at;
    if (left <= 0) return {};
    return {source + at,
            static_cast<u32>(at < 0 ? -at : 0) |
                static_cast<u32>(left < kSegmentBytes ? left : kSegmentBytes) << 16,
            row, at};
  }

  __device__ char* target_of(i64 first_row) const {
    const u32 layer = layer_of(own_.row);
    const i32 slot = shared_.victims[own_.row - layer * num_missed_];
    return address_of(p_.cache, entry_of(p_.cache, layer), first_row + slot) + own_.at;
  }

  __device__ u32 layer_of(u32 row) const { return p_.num_layers == 1 ? 0 : row / num_missed_; }
  static __device__ const BufferEntry& entry_of(const BlockSide& side, u32 layer) {
    return side.table != nullptr ? side.table[layer] : side.first;
  }
  static __device__ char* address_of(const BlockSide& side, const BufferEntry& entry, i64 row) {
    const i64 parts = side.num_parts;
    const i64 offset = parts == 1
                           ? row * entry.block_bytes
                           : row / parts * entry.block_bytes + row % parts * entry.part_bytes;
    return reinterpret_cast<char*>(entry.address) + offset;
  }

  template <class T>
  static __device__ T from_lane(T value, int lane) {
    if constexpr (sizeof(T) == 8) {
      return reinterpret_cast<T>(__shfl_sync(kFullWarp, reinterpret_cast<u64>(value), lane));
    } else {
      return __shfl_sync(kFullWarp, value, lane);
    }
  }
  static __device__ u32 offset() { return threadIdx.x % kWarpLanes * kVecBytes; }
  static __device__ bool is_inside(u32 range) {
    return offset() >= (range & 0xffffu) && offset() < range >> 16;
  }

  static constexpr i32 kSegmentBytes = segment_bytes(kVecBytes);
  const ResidencyParams& p_;
  const ResidencyShared& shared_;
  const u32 num_missed_;
  const u32 num_segments_;
  const u32 step_;
  u32 first_;  // number of the warp's first segment in flight
  Segment own_;
  Vec<kVecBytes> value_[kInFlight];
};

template <int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy, bool kUsePdl,
          int kInFlight>
struct SwapIn {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024,
                "whole warps; a lane adds the totals of one");
  using Params = ResidencyParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;
  static constexpr int kWarps = kThreads / 32;
  // Steps of 32 rows, and slots, that a warp holds in registers: 2,048 a block. More of them are
  // more code: with 8,192 slots a call takes 0.9 us longer.
  static constexpr int kRowsAhead = 64 / kWarps, kSlotsAhead = 64 / kWarps;

  static __device__ void run(const Params& p) {
    const Cluster cluster = Cluster::here();
    const ResidencyShared shared(shared_memory(), p.table_size, p.length, p.state.num_slots);
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
    WarpShare<Int, kRowsAhead> rows(static_cast<const Int*>(p.rows) + i64(list) * p.length,
                                    p.length, warp(), kWarps);
    const i64 state = state_of(p, list);
    if (state < 0) return fill(p, list);
    const ResidencyState& s = p.state;
    i32* const slot_of_row = s.slot_of_row + state * s.num_rows;
    i32* const row_of_slot = s.row_of_slot + state * s.num_slots;
    i32* const order_of_state = s.order + state * s.num_evictable;
    WarpShare<i32, kSlotsAhead> order(order_of_state, s.num_evictable,
                                      static_cast<i32>(cluster.rank) * kWarps + warp(),
                                      static_cast<i32>(cluster.size) * kWarps);
    const i32 front_slot = thread() < s.num_evictable ? order_of_state[thread()] : -1;
    const i64 count_before = threadIdx.x < 3 ? s.counts[3 * state + threadIdx.x] : 0;

    // The slot of each row, or its cell in a table of the missing rows, with its first position.
    // All slots are loaded before one is used.
    i32 slots[kRowsAhead];
#pragma unroll
    for (int step = 0; step < kRowsAhead; ++step) {
      const Int row = rows.ahead[step];
      slots[step] = row >= 0 && row < s.num_rows ? slot_of_row[row] : -1;
    }
    const bool is_twice = is_asked_twice(p, list, state);
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
          const u32 cell = insert(p, shared, static_cast<i32>(row));
          atomicMin(&shared.firsts[cell], at);
          found = kInCell - static_cast<i32>(cell);
        }
      }
      ++step;
      if (inside) shared.found[at] = found;
    });
    if (__syncthreads_or(is_twice || wrong_at >= 0)) {
      if (wrong_at >= 0 && blockIdx.x == 0) {
        const i64 place = i64(list) * p.length + wrong_at;
        report_fault(p.fault, p.rows_site, place, static_cast<const Int*>(p.rows)[place],
                     s.num_rows);
      }
      return fill(p, list);
    }

    // The misses in the order of the list, and how many slots this step does not use: in the
    // block's share of the order, and among its first kThreads slots.
    const auto is_first_miss = [&](i32 at, Int) {
      const i32 found = shared.found[at];
      return found <= kInCell && shared.firsts[kInCell - found] == at;
    };
    const auto is_stale = [&](i32, i32 slot) {
      return u32(slot) < u32(s.num_slots) && (shared.used[slot / 32] >> slot % 32 & 1) == 0;
    };
    const u32 front = __ballot_sync(kFullWarp, is_stale(0, front_slot));
    Totals totals{warp_sum(num_asked), rows.mark(is_first_miss), order.mark(is_stale),
                  __popc(front)};
    const Totals before = add_lower_warps(shared, totals);
    const i32 num_missed = totals.missed;
    cluster.wait();  // all blocks have started
    if (threadIdx.x < cluster.size) {
      cluster.peer(shared.stale_of_block, threadIdx.x)[cluster.rank] = totals.stale;
    }
    if (num_missed > 0) {
      rows.for_ranks(before.missed, is_first_miss, [&](i32 at, Int row, i32 miss, bool is_first) {
        if (!is_first) return;
        shared.missed[miss] = static_cast<i32>(row);
        shared.firsts[kInCell - shared.found[at]] = kFirstMiss + miss;
      });
      // The victims: mostly the first slots of the order have enough of them.
      take_victims(shared, num_missed, before.front, front, front_slot);
      i32 num_found = totals.front;
      for (i32 first = kThreads; num_found < num_missed && first < s.num_evictable;
           first += kThreads) {
        const i32 at = first + thread();
        const i32 slot = at < s.num_evictable ? order_of_state[at] : -1;
        const u32 ballot = __ballot_sync(kFullWarp, is_stale(0, slot));
        Totals more{0, 0, 0, __popc(ballot)};
        __syncthreads();  // of_warp has been read
        const Totals below = add_lower_warps(shared, more);
        take_victims(shared, num_missed, num_found + below.front, ballot, slot);
        num_found += more.front;
      }
    }
    cluster.arrive();  // this block has read the state
    Fetch<kVecBytes, kInFlight> fetch(p, shared, num_missed, cluster);
    if (num_missed > 0) {
      __syncthreads();
      fetch.load();
    }
    cluster.wait();
    const i32 of_block =
        lane() < static_cast<i32>(cluster.size) ? shared.stale_of_block[lane()] : 0;
    const i32 num_stale = warp_sum(of_block);
    const i32 first_stale =
        before.stale + warp_sum(lane() < static_cast<i32>(cluster.rank) ? of_block : 0);
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
    for (i32 miss = place_in_list(); miss < num_missed; miss += threads_of_list()) {
      const i32 slot = shared.victims[miss], new_row = shared.missed[miss];
      const i32 old_row = row_of_slot[slot];
      if (u32(old_row) < u32(s.num_rows)) slot_of_row[old_row] = -1;
      slot_of_row[new_row] = slot;
      row_of_slot[slot] = new_row;
    }
    if (cluster.rank == 0) count(p, state, totals, count_before);
    const i64 first_row = state * s.num_slots;
    write_slots(p, shared, list, first_row);
    if (p.plan_pairs != nullptr) write_plan(p, shared, list, first_row, num_missed);
    fetch.store_all(first_row);
    if (is_long) {
      cluster.sync();
      for (i32 at = place_in_list(); at < s.num_evictable; at += threads_of_list()) {
        order_of_state[at] = new_order[at];
      }
    }
  }

 private:
  static constexpr i32 kNoRow = -1;
  static constexpr i32 kNoPosition = 0x7fffffff;
  static constexpr i32 kFirstMiss = 1 << 30;  // of miss m the table has kFirstMiss + m in the end
  // What is found for a position: a slot, nothing, or kInCell - its cell in the table.
  static constexpr i32 kPadding = -1, kInCell = -2;

  // `stale` is the block's share of the order, `front` its first slots, the others the whole list.
  struct Totals {
    i32 asked;
    i32 missed;
    i32 stale;
    i32 front;
  };

  static __device__ i32 thread() { return static_cast<i32>(threadIdx.x); }
  static __device__ i32 lane() { return thread() % 32; }
  static __device__ i32 warp() { return thread() / 32; }

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

  // Whether another list has this state: each would take the other's slots.
  static __device__ bool is_asked_twice(const Params& p, i32 list, i64 state) {
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

  // -- the hash table

  static __device__ u32 hash_of(const Params& p, i32 row) {
    return static_cast<u32>(u64(u32(row) * 0x9e3779b1u) * p.table_size >> 32);
  }

  static __device__ u32 insert(const Params& p, const ResidencyShared& shared, i32 row) {
    u32 cell = hash_of(p, row);
    while (true) {
      const i32 key = atomicCAS(&shared.keys[cell], kNoRow, row);
      if (key == kNoRow || key == row) return cell;
      cell = cell + 1 == p.table_size ? 0 : cell + 1;
    }
  }

  // Replaces a warp's totals by those of the block; returns those of the warps below.
  static __device__ Totals add_lower_warps(const ResidencyShared& shared, Totals& totals) {
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
  static __device__ void take_victims(const ResidencyShared& shared, i32 num_missed, i32 first,
                                      u32 ballot, i32 slot) {
    const i32 victim = first + rank_in(ballot);
    if ((ballot >> lane() & 1) && victim < num_missed) shared.victims[victim] = slot;
  }

  // -- outputs; the blocks of a list share them

  static __device__ i32 place_in_list() {
    return static_cast<i32>(blockIdx.x) * kThreads + thread();
  }
  static __device__ i32 threads_of_list() { return static_cast<i32>(gridDim.x) * kThreads; }

  // The outputs of a list that is not served.
  static __device__ void fill(const Params& p, i32 list) {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      const i64 place = i64(list) * p.length + at;
      static_cast<Int*>(p.slots_out)[place] = -1;
      if (p.plan_pairs != nullptr) set_pair(p, place, -1, -1);
    }
    if (p.plan_pairs != nullptr && blockIdx.x == 0 && threadIdx.x == 0) p.plan_counts[list] = 0;
  }

  static __device__ void set_pair(const Params& p, i64 place, i64 row, i64 cache_row) {
    Int* const pair = static_cast<Int*>(p.plan_pairs) + 2 * place;
    pair[0] = static_cast<Int>(row);
    pair[1] = static_cast<Int>(cache_row);
  }

  static __device__ void write_slots(const Params& p, const ResidencyShared& shared, i32 list,
                                     i64 first_row) {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      i32 found = shared.found[at];
      if (found <= kInCell) found = shared.victims[shared.firsts[kInCell - found] - kFirstMiss];
      static_cast<Int*>(p.slots_out)[i64(list) * p.length + at] =
          static_cast<Int>(found == kPadding ? -1 : first_row + found);
    }
  }

  static __device__ void write_plan(const Params& p, const ResidencyShared& shared, i32 list,
                                    i64 first_row, i32 num_missed) {
    for (i32 at = place_in_list(); at < p.length; at += threads_of_list()) {
      const bool is_miss = at < num_missed;
      set_pair(p, i64(list) * p.length + at, is_miss ? shared.missed[at] : -1,
               is_miss ? first_row + shared.victims[at] : -1);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) p.plan_counts[list] = num_missed;
  }

  // Adds to the numbers of hits, misses and bytes of the state.
  static __device__ void count(const Params& p, i64 state, const Totals& totals, i64 before) {
    if (thread() >= 3) return;
    const i64 misses = totals.missed;
    const i64 more = thread() == 0   ? totals.asked - misses
                     : thread() == 1 ? misses
                                     : misses * p.row_bytes;
    p.state.counts[3 * state + thread()] = before + more;
    p.state.host_counts[3 * state + thread()] = before + more;
  }
};

}  // namespace jitkern
