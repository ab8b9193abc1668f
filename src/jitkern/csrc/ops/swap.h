// Parameters of the kernels of swap_rows.
#pragma once

#include "pairs.h"
#include "regions.h"

namespace jitkern {

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
  // Of a call in the order of the host's memory: row i takes what triple i fetches, for the slots
  // are still being read; and the batch of triples that was taken last, see for_batches.
  char* staging;
  u32* last_batch;
};

// A call in the order of the host's memory. Rows to fetch and rows to write back to have an order
// each, so triples are taken apart: move i of the sorted list fetches one row into staging and
// writes a slot back to another, of two triples. Only exchanges stay whole, and come first: their
// row is read before it is written.
enum MoveKind : int { kExchanges, kFetches, kBacks, kNumMoveKinds };

struct SwapListParams : SwapParams {
  Regions regions;
  u32* ranks;  // [num_triples, 2]: numbers in their regions of the row to fetch and of the one to
               // write back to, or kNotListed; the second kExchanged where it is one of an exchange
  void* moves;   // [num_triples, 3]: row to fetch, slot, row to write back to; starts as -1
  void* places;  // [num_triples, 2]: row of staging, slot that takes it; starts as -1
};
constexpr u32 kExchanged = 0xfffffffeu;

// A row in flight costs 8 registers beside its vectors, of the new row and of the old. Where a lane
// has one vector of each, four rows spill up to 108 bytes of 16-byte vectors and 20 of 8-byte ones,
// three of 16-byte ones 12.
JITKERN_HOST_DEVICE constexpr int swap_in_flight(i64 window_bytes, i64 vec_bytes, int in_flight) {
  const int most = vec_bytes == 16 ? 2 : 3;
  return window_bytes <= 32 * vec_bytes && in_flight > most ? most : in_flight;
}

}  // namespace jitkern
