// Parameters of store_cache, filled by store.cc and read by store.cu.
#pragma once

#include <jitkern/groups.h>

namespace jitkern {

constexpr int kStoreMaxChunks = 2;  // vectors of one row that a lane moves at a time
constexpr int kStoreInFlight = 2;   // the same over several rows, where rows are short

struct StoreParams {
  struct Copy {
    char* cache;
    const char* rows;
    i64 cache_stride_bytes;
    i64 row_stride_bytes;
  };
  Copy copies[2];  // K and V; blockIdx.y chooses
  const void* indices;
  i64 num_rows;
  i64 num_slots;
  FaultRecord* fault;
};

}  // namespace jitkern
