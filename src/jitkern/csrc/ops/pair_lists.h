// Parameters of the kernels that sort the pairs of a large call in front of its copy.
#pragma once

#include "pairs.h"
#include "regions.h"

namespace jitkern {

constexpr u32 kNoOwner = 0xffffffffu;

// `list` sorts the pairs of a call into two lists: rows to bring over PCIe, with a table each
// source row once, and rows that are in device memory by then and are copied there. `slot_map` says
// where rows already live in device memory, -1: nowhere; null: unknown.
//
// With `ranks` the rows to bring are listed in the order of the host's memory: `list` only numbers
// them, `place` writes their list. Table, counters and regions start as all ones, so that one
// memset prepares them.
struct ListParams : PairCopyParams {
  u32* table;         // open addressing over source rows: the number of the pair that owns one;
                      // null: repeats are brought once each
  u32 table_mask;     // its size, a power of two, less 1
  u32* last_entries;  // [2]: the last entry of each list, -1: none
  void* fetches;      // [num_pairs, 2]: source row, destination row
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  void* copied_rows;  // [num_pairs]: source row of a copy that the slot map must learn of, or -1
  u32* ranks;         // [num_pairs]: number among the fetches of its region, or kNotListed; null:
                      // fetches are listed as they come
  Regions regions;
  FaultSite slot_map_site;
};

}  // namespace jitkern
