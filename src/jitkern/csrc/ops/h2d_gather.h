// Parameters of the kernels that spare h2d_gather a second read of the same row.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

constexpr u32 kNoOwner = 0xffffffffu;

// The kernel `claim` sorts pairs into two lists: rows to fetch over PCIe, each source row once, and
// rows that are in device memory by then and are copied there. Table and counters start as all
// ones.
struct ClaimParams {
  const void* pairs;
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  u32* table;            // open addressing over source rows: the number of the pair that owns one
  u32 table_mask;        // its size, a power of two, less 1
  u32* last_entries;     // [2]: the last entry of each list, -1: none
  void* fetches;         // [num_pairs, 2]: source row, destination row
  void* copies;          // [num_pairs, 2]: destination row to copy from, destination row
  void* copied_rows;     // [num_pairs]: source row of a copy that the slot map must learn of, or -1
  const void* slot_map;  // where rows already live in device memory, -1: nowhere; null: unknown
  i32 slot_map_bytes;
  FaultSite src_site;
  FaultSite dst_site;
  FaultSite slot_map_site;
  FaultRecord* fault;
};

}  // namespace jitkern
