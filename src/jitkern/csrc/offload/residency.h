// Parameters of the kernel of ResidencyMap.
#pragma once

#include "ops/cache_strides.h"
#include "ops/copy_blocks.h"

namespace jitkern {

// The state of a map, in device memory.
struct ResidencyState {
  i32* slot_of_row;  // [num_states, num_rows]; -1: none
  i32* row_of_slot;  // [num_states, num_slots]; -1: none
  i32* order;        // [num_states, num_evictable]: slots, the least recently used first
  i32* next_order;   // the same shape: where a long order is written before it is copied back
  i64* counts;       // [num_states, 3]: hits, misses, bytes
  i64* host_counts;  // a copy in pinned host memory
  i32 num_states;
  i32 num_slots;      // slots of a state, below 2^30
  i32 num_evictable;  // the first slots; the others are pinned
  i32 num_rows;       // rows are below it
};

struct ResidencyParams {
  ResidencyState state;
  BlockSide host;      // rows as its blocks
  BlockSide cache;     // slot s of state i is row i * num_slots + s
  i64 row_bytes;       // a row's in all buffers
  u32 num_layers;      // buffers of each side; 0: nothing is fetched
  Divisor segments;    // segments of a row in a buffer: see segments_of()
  const void* rows;    // [num_lists, length]
  void* slots_out;     // the same shape
  void* plan_pairs;    // [num_lists, length, 2]: (row, row of the cache), or -1
  i32* plan_counts;    // [num_lists]: pairs; null: no plan
  const void* states;  // [num_lists]; null: list i asks for state i
  const void* pages;   // [num_states, num_pages]: pages of the host's rows; null: row r is row r
  const void* count;   // lists that are used; null: all
  i32 states_bytes;    // 4 or 8
  i32 count_bytes;
  i32 pages_bytes;
  i32 num_pages;
  i64 num_host_pages;  // pages are below it
  Divisor page;        // rows of a page
  i32 num_lists;
  i32 length;
  u32 table_size;  // entries of the hash table, at least 2 * length
  FaultSite rows_site;
  FaultSite length_site;
  FaultSite states_site;
  FaultSite twice_site;
  FaultSite pages_site;
  FaultRecord* fault;
};

constexpr int kMostBlocksOfCluster = 8;

// The shared memory of a block. Victims and missed rows take the place of the keys, which are not
// needed any more when they are written.
struct ResidencyShared {
  i32* keys;            // [table_size]: rows that no slot holds; -1: none
  i32* firsts;          // [table_size]: the first position of the row in the list
  i32* found;           // [length]: see kInCell
  u32* used;            // a bit for each slot
  i32* of_warp;         // [32, 4]
  i32* stale_of_block;  // [kMostBlocksOfCluster]
  i32* victims;         // [length]
  i32* missed;          // [length]
  i32* host_rows;       // [length]: the missed rows in the host's table
  i64 bytes;

  JITKERN_HOST_DEVICE ResidencyShared(char* memory, i64 table_size, i64 length, i64 num_slots,
                                      bool has_pages) {
    keys = reinterpret_cast<i32*>(memory);
    firsts = keys + table_size;
    found = firsts + table_size;
    used = reinterpret_cast<u32*>(found + length);
    of_warp = reinterpret_cast<i32*>(used + (num_slots + 31) / 32);
    stale_of_block = of_warp + 32 * 4;
    victims = keys;
    missed = keys + length;
    i32* const end = stale_of_block + kMostBlocksOfCluster;
    host_rows = has_pages ? end : missed;
    bytes = reinterpret_cast<char*>(end + (has_pages ? length : 0)) - memory;
  }
};

constexpr i64 kMostListLength = 8192;

}  // namespace jitkern
