// Parameters of swap_rows, filled by swap.cc and read by swap.cu.
#pragma once

#include "pairs.h"

namespace jitkern {

struct SwapParams {
  char* host;
  char* gpu;
  i64 host_stride_bytes;
  i64 gpu_stride_bytes;
  const void* triples;  // [num_triples, 3]: host row to fetch, slot, host row of its old content
  i64 num_triples;
  i64 num_host_rows;
  i64 num_slots;
  FaultSite fetch_site;
  FaultSite slot_site;
  FaultSite back_site;
  FaultRecord* fault;
};

// A row in flight costs 8 registers beside its vectors, of the new row and of the old. Where a lane
// has one vector of each, four rows spill up to 108 bytes of 16-byte vectors and 20 of 8-byte ones,
// three of 16-byte ones 12.
JITKERN_HOST_DEVICE constexpr int swap_in_flight(i64 window_bytes, i64 vec_bytes, int in_flight) {
  const int most = vec_bytes == 16 ? 2 : 3;
  return window_bytes <= 32 * vec_bytes && in_flight > most ? most : in_flight;
}

}  // namespace jitkern
