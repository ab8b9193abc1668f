// Parameters of indexing, filled by index.cc and read by index.cu and index_table.cu.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

struct IndexParams {
  char* output;
  const char* weights;
  i64 output_stride_bytes;
  i64 weights_stride_bytes;
  const void* indices;
  i64 num_rows;
  i64 vocab_start;  // index `vocab_start + r` reads row r of `weights`
  i64 vocab_length;
  // Larger ones are faults. Of a part of a table none is: what lies outside of it may be another
  // rank's, and is zeros here.
  i64 last_index;
  FaultSite indices_site;
  FaultRecord* fault;
};

// Of a table in host memory, whose rows are fetched as pairs: see index_table.cu.
struct IndexPairsParams : IndexParams {
  void* pairs;  // [num_rows, 2]: row of `weights`, row of `output`, or both -1
};

}  // namespace jitkern
