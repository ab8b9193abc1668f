// Parameters of kernels that copy rows between a pool in host memory and the memory of all ranks of
// a host. Each rank moves a part of the rows over its own link.
//
// All ranks have the same pairs, and each computes its part from the number of distinct rows in
// each region of the pool (ops/sort.cuh), which does not depend on the order of threads. A part is
// a contiguous range in the order of the pool. If a region belongs to two parts, a hash decides for
// each of its rows. If several pairs ask for a row, the first one fetches it; the others copy it
// within the rank's memory.
#pragma once

#include "comm/peer_reduce.h"
#include "ops/pairs.h"

namespace jitkern {

// A copy of rows from host memory to each rank, or from this rank to host memory.
//
// Lists of misses end with padding. So pairs are copied in turns of 4: those of the first turn of
// every list, then those of the second. List after list, 26 of 512 warps copied everything: 76 us
// instead of 34 (32 lists of 2,048, 5 % of them misses, 2 H200s).
struct PeerCopyParams : PairCopyParams {
  i64 shifts[kMostPeers];  // from a row of `dst` to its other copies; the first is 0
  u32 num_shifts;
  u32 rank;  // ranks take turns; 0 of 1 if the list has only this rank's pairs
  u32 num_ranks;
  u32 num_lists;
  u32 list_length;
  u32 batch_pairs;    // pairs that a warp reads at once, 1 to 32
  const u32* intact;  // PeerControl's: not kUnwritten if a barrier has failed

  static constexpr bool kHasShifts = true;
  static constexpr bool kHasBatches = true;
  static constexpr u32 kPairsInTurn = 4;  // a group of loads has no more; num_pairs: whole turns

  // The number of the i-th pair in the order of turns; -1 past the end of its list.
  JITKERN_HOST_DEVICE constexpr i64 pair_number(i64 i) const {
    const u32 turn = static_cast<u32>(i / kPairsInTurn);
    const u32 at = turn / num_lists * kPairsInTurn + static_cast<u32>(i % kPairsInTurn);
    return at < list_length ? i64(turn % num_lists) * list_length + at : -1;
  }

  // Whether this rank copies the i-th pair. Each list begins with another rank.
  JITKERN_HOST_DEVICE constexpr bool has_pair(i64 i) const {
    const u32 turn = static_cast<u32>(i / kPairsInTurn);
    return (turn / num_lists + turn % num_lists) % num_ranks == rank;
  }
};

// A counting sort, as with ListParams, into this rank's part and the copies of all ranks. All ones
// at the start: table, entries, cursors, fetches, and the regions' counts.
struct PeerListParams : PairCopyParams {
  u32* table;         // hash table from source row to the first pair that asks for it; null: no
                      // row is asked for twice
  u32 table_mask;     // its size, a power of two, minus 1
  u32* places;        // [num_pairs]: the place of its row in the table, or kNotListed
  u32* last_entries;  // [3]: the last of fetches, of copies, and of the fetches of all ranks
  void* fetches;      // [num_pairs, 2]: source row, destination row; -1 if there is none
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  u32* cursors;       // [kNumRegions]: the last row of each region that is placed
  Regions regions;
  u32 rank;
  u32 num_ranks;
};

// Where part i of `total` rows begins. A row is in part `position * num / total`.
JITKERN_HOST_DEVICE constexpr u64 part_begin(u64 total, u32 i, u32 num) { return total * i / num; }

}  // namespace jitkern
