// Parameters of the kernels that copy rows by pairs (h2d_gather, d2h_scatter) or by triples
// (swap_rows), and that sort them.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

constexpr int kHostLineBytes = 128;  // a PCIe read request of the GPU carries one such line

// Which side of the copy is in host memory: its lines decide where lanes start.
enum HostSide : int { kHostSource, kHostTarget };

struct PairCopyParams {
  char* dst;
  const char* src;
  i64 dst_stride_bytes;
  i64 src_stride_bytes;
  const void* pairs;      // [num_pairs, 2]: source row, destination row
  const u32* last_pair;   // in device memory, -1: none; null: there are num_pairs
  u32* last_batch;        // see for_batches; may be null
  void* slot_map;         // gets slot_map[source row] = destination row; may be null
  const void* slot_rows;  // the source rows for slot_map, if not those of `pairs`; may be null
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  i32 slot_map_bytes;  // 4 or 8: bytes of one element of slot_map
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;

  static constexpr bool kHasShifts = false;  // a row goes to one place; PeerCopyParams has others
};

// The bytes of all lines that one row can touch: an unaligned row may start up to 128 - vec_bytes
// bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 window_bytes(i64 row_bytes, i64 vec_bytes, bool line_aligned) {
  if (line_aligned) return row_bytes;
  const i64 last = kHostLineBytes - vec_bytes + row_bytes;
  return (last + kHostLineBytes - 1) / kHostLineBytes * kHostLineBytes;
}

constexpr u32 kNotListed = 0xffffffffu;
constexpr u32 kNoOwner = 0xffffffffu;
// As many as one block sums up. Out of pools of 1.5 to 64 GiB, 8,192 to 1,048,576 rows come as fast
// by 4,096 regions as by up to 262,144.
constexpr u32 kNumRegions = 4096;

// A counting sort of rows by their regions of host memory: the first kernel numbers the rows of
// each region, the second sums up the regions, the third writes each row to its place.
struct Regions {
  u32* last_ranks;  // [num_kinds, kNumRegions]: the last number of each region; starts as -1
  u32* starts;      // the same: rows in the regions before; both at multiples of 16 bytes
  u32* last_entry;  // takes the place of the last row, -1: none
  u32 num_kinds;    // of rows, sorted one kind after the other
  i32 shift;        // a region is 2^shift bytes of host memory
};

// The pairs of a large call as two lists: rows to fetch over PCIe, and rows to copy in device
// memory, either repeats of a fetched row or rows that `slot_map` says are there (-1: nowhere).
struct ListParams : PairCopyParams {
  u32* table;         // open addressing over source rows: the number of the pair that fetches one;
                      // starts as -1; null: repeats are fetched too
  u32 table_mask;     // its size, a power of two, less 1
  u32* last_entries;  // [2]: the last entry of each list; starts as -1
  void* fetches;      // [num_pairs, 2]: source row, destination row
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  void* copied_rows;  // [num_pairs]: source row of a copy that the slot map must learn of, or -1
  u32* ranks;         // [num_pairs]: number among the fetches of its region, or kNotListed; null:
                      // fetches are listed as they come
  Regions regions;
  FaultSite slot_map_site;
};

// -- swap_rows -----------------------------------------------------------------------------------

struct SwapParams {
  char* host;
  char* gpu;
  i64 host_stride_bytes;
  i64 gpu_stride_bytes;
  const void* triples;  // [num_triples, 3]: host row to fetch, slot, host row of its old content
  i64 num_triples;
  i64 first_position;  // of these triples in the call's: a large call is swapped in parts
  i64 num_host_rows;
  i64 num_slots;
  FaultSite fetch_site;
  FaultSite slot_site;
  FaultSite back_site;
  FaultRecord* fault;
  char* staging;    // of a sorted call: row i takes what move i fetches, as slots are still read
  u32* last_batch;  // of moves, see for_batches
};

// A sorted call takes triples apart, as rows to fetch and rows to write back to have an order each:
// a move fetches the row of one triple into staging and writes back the slot of another. Only
// exchanges stay whole, and come first: their row is read before it is written.
enum MoveKind : int { kExchanges, kFetches, kBacks, kNumMoveKinds };

struct SwapListParams : SwapParams {
  Regions regions;
  u32* ranks;  // [num_triples, 2]: numbers in their regions of the row to fetch and of the one to
               // write back to, or kNotListed; the second kExchanged where it is one of an exchange
  void* moves;   // [num_triples, 3]: row to fetch, slot, row to write back to; starts as -1
  void* places;  // [num_triples, 2]: row of staging, slot that takes it; starts as -1
};
constexpr u32 kExchanged = 0xfffffffeu;

// A row in flight costs 8 registers beside its vectors. If a lane has one vector of the new and of
// the old row, four rows spill, and three rows of 16-byte vectors too.
JITKERN_HOST_DEVICE constexpr int swap_in_flight(i64 window_bytes, i64 vec_bytes, int in_flight) {
  const int most = vec_bytes == 16 ? 2 : 3;
  return window_bytes <= 32 * vec_bytes && in_flight > most ? most : in_flight;
}

}  // namespace jitkern
