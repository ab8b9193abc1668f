// Parameters of h2d_gather, filled by h2d_gather.cc and read by h2d_gather.cu.
#pragma once

#include <jitkern/groups.h>

namespace jitkern {

constexpr int kHostLineBytes = 128;  // a PCIe read request of the GPU carries one such line
constexpr int kGatherMaxChunks = 8;  // vectors of one row that a lane moves at a time
constexpr int kGatherInFlight = 8;   // in large calls: 8 * 16 B * 2,048 threads are 2 us of the bus
constexpr int kSmallInFlight = 1;    // in small calls rows are spread over warps instead

// The bytes of all lines that one row can touch. Where rows are only aligned to a vector, a row may
// start up to 128 - vec_bytes bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 window_bytes(i64 row_bytes, i64 vec_bytes, bool line_aligned) {
  if (line_aligned) return row_bytes;
  const i64 last = kHostLineBytes - vec_bytes + row_bytes;
  return (last + kHostLineBytes - 1) / kHostLineBytes * kHostLineBytes;
}

struct GatherParams {
  char* dst;        // rows in device memory
  const char* src;  // rows in pinned host memory, by their device address
  i64 dst_stride_bytes;
  i64 src_stride_bytes;
  const void* pairs;  // [num_pairs, 2]: source row, destination row
  void* slot_map;     // [num_src_rows] or null: ends with slot_map[source row] = destination row
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  i32 slot_map_bytes;  // 4 or 8: bytes of one element of slot_map
  FaultRecord* fault;
};

}  // namespace jitkern
