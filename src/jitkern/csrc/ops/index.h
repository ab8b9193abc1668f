// Parameters of indexing, filled by index.cc and read by index.cu.
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
  // The first index that is a fault. Between the vocabulary range and this bound lies another
  // rank's part of the table: zeros, no fault.
  i64 bound;
  FaultSite indices_site;
  FaultRecord* fault;
};

}  // namespace jitkern
