// Parameters of indexing, filled by index.cc and read by index.cu.
#pragma once

#include <jitkern/groups.h>

namespace jitkern {

constexpr int kIndexMaxChunks = 2;  // vectors of one row that a lane moves at a time
constexpr int kIndexInFlight = 4;   // the same over several rows, where rows are short

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
  FaultRecord* fault;
};

}  // namespace jitkern
