// Parameters of store_cache, filled by store.cc and read by store.cu.
#pragma once

#include "cache_strides.h"

namespace jitkern {

struct StoreParams {
  struct Copy {
    char* cache;
    const char* rows;
    CacheStrides strides;
    i64 row_stride_bytes;
  };
  Copy copies[2];  // K and V, or one alone; blockIdx.y chooses
  const void* indices;
  i64 num_rows;
  i64 num_slots;
  i64 skip;          // an index whose row is not stored; negative: none
  u32 first_blocks;  // if rows have two sizes: blocks of the shorter ones, which are copies[0]
  FaultSite indices_site;
  FaultRecord* fault;
};

}  // namespace jitkern
