// Rows between one pool in host memory and the memory of all ranks of a host, each of which moves a
// part of them over its own link: what kernels are told.
//
// All ranks have the same pairs, and each finds out for itself which rows are its part: from the
// number of distinct rows in each region of the pool (ops/sort.cuh), which does not depend on the
// order in which threads come. A rank has the rows from a place on in the order of the pool, up to
// the next rank's; where a region lies across that place, its rows are shared out by a hash. A
// pair that asks for a row again, behind the first one that does, copies it in the rank's memory.
#pragma once

#include "comm/peer_reduce.h"
#include "ops/pairs.h"

namespace jitkern {

// A copy of rows of host memory to each rank, or to the host from this one.
struct PeerCopyParams : PairCopyParams {
  i64 shifts[kMostPeers];  // from a row of `dst` to where else it is written; the first is 0
  u32 num_shifts;
  const u32* intact;  // see PeerControl: not kUnwritten where a barrier was given up

  static constexpr bool kHasShifts = true;
};

// A counting sort as of ListParams, into this rank's part and into what all copy. What starts as
// all ones: table, entries, cursors, fetches, and the regions' numbers.
struct PeerListParams : PairCopyParams {
  u32* table;         // open addressing over source rows: the first pair that asks for one; null:
                      // no row is asked for twice
  u32 table_mask;     // its size, a power of two, less 1
  u32* places;        // [num_pairs]: where in the table its row is, kNotListed: nowhere
  u32* last_entries;  // [3]: the last of fetches, of copies, and of the fetches of all ranks
  void* fetches;      // [num_pairs, 2]: source row, destination row; -1 where there is none
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  u32* cursors;       // [kNumRegions]: the last row of each that was placed
  Regions regions;
  u32 rank;
  u32 num_ranks;
};

// Where part i of `total` rows begins. A row is in part `position * num / total`, which begins
// there or in front of it.
JITKERN_HOST_DEVICE constexpr u64 part_begin(u64 total, u32 i, u32 num) { return total * i / num; }

}  // namespace jitkern
