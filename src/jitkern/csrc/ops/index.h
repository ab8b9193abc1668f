// Parameters of indexing, filled by index.cc and read by index.cu.
#pragma once

#include "cache_strides.h"

namespace jitkern {

struct IndexParams {
  char* output;
  const char* weights;
  i64 output_stride_bytes;
  CacheStrides strides;  // strides of `weights`
  const void* indices;
  i64 num_rows;
  i64 vocab_start;  // index `vocab_start + r` reads row r of `weights`
  i64 vocab_length;
  i64 added_start;  // index `added_start + r` reads row `added_row + r`: a second range
  i64 added_length;
  i64 added_row;
  // Larger indices are faults. A vocab_range without a vocab_size has none: indices outside of this
  // part of the table may belong to another rank, and give zeros.
  i64 last_index;
  FaultSite indices_site;
  FaultRecord* fault;
};

// The row of `weights` that an index reads; -1: zeros. The ranges share no index.
JITKERN_HOST_DEVICE inline i64 table_row(const IndexParams& p, i64 index) {
  // Unsigned, so that one comparison also excludes negative indices.
  const u64 row = u64(index) - u64(p.vocab_start);
  const u64 added = u64(index) - u64(p.added_start);
  const i64 other = added < u64(p.added_length) ? p.added_row + i64(added) : -1;
  return row < u64(p.vocab_length) ? i64(row) : other;
}

}  // namespace jitkern
