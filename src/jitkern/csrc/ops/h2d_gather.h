// Parameters of the kernels that spare h2d_gather a second read of the same row.
#pragma once

#include "pairs.h"

namespace jitkern {

constexpr u32 kNoOwner = 0xffffffffu;

// The kernel `claim` sorts the pairs of a call into two lists: rows to fetch over PCIe, each source
// row once, and rows that are in device memory by then and are copied there. Table and counters
// start as all ones. `slot_map` says where rows already live in device memory, -1: nowhere; null:
// unknown.
struct ClaimParams : PairCopyParams {
  u32* table;         // open addressing over source rows: the number of the pair that owns one
  u32 table_mask;     // its size, a power of two, less 1
  u32* last_entries;  // [2]: the last entry of each list, -1: none
  void* fetches;      // [num_pairs, 2]: source row, destination row
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  void* copied_rows;  // [num_pairs]: source row of a copy that the slot map must learn of, or -1
  FaultSite slot_map_site;
};

}  // namespace jitkern
