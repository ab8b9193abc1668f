// Parameters of write_twice, filled by twice.cc and read by twice.cu.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

struct TwiceParams {
  char* output;
  const char* rows;
  i64 output_stride_bytes;
  i64 row_stride_bytes;
  i64 num_rows;
  FaultRecord* fault;
};

}  // namespace jitkern
