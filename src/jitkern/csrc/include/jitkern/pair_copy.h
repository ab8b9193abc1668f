// Parameters of the copies that pairs of rows ask for (h2d_gather, d2h_scatter).
#pragma once

#include <jitkern/groups.h>

namespace jitkern {

constexpr int kHostLineBytes = 128;  // a PCIe read request of the GPU carries one such line

// How many vectors a thread has in flight, of one row or of several.
constexpr int kLargeInFlight = 8;    // 8 * 16 B * 2,048 threads are 5 us of the bus
constexpr int kScatterInFlight = 4;  // writes are posted: nothing waits for their answer
constexpr int kSmallInFlight = 1;    // in small calls vectors are spread over threads instead

// Which side of the copy is in host memory: its lines decide where lanes start.
enum HostSide : int { kHostSource, kHostTarget };

struct PairCopyParams {
  char* dst;
  const char* src;
  i64 dst_stride_bytes;
  i64 src_stride_bytes;
  const void* pairs;        // [num_pairs, 2]: source row, destination row
  const u32* num_pairs_m1;  // in device memory, less 1; null: num_pairs is the number
  // In device memory, the number of the next batch of rows, less 1: warps take batches as they come
  // free, because beside a GEMM one block may start 1 ms after the other. Null: equal shares.
  u32* next_batch_m1;
  void* slot_map;         // ends with slot_map[source row] = destination row; may be null
  const void* slot_rows;  // the source rows of slot_map, if not those of `pairs`; may be null
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  i32 slot_map_bytes;  // 4 or 8: bytes of one element of slot_map
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;
};

// The bytes of all lines that one row can touch. Where rows are only aligned to a vector, a row may
// start up to 128 - vec_bytes bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 window_bytes(i64 row_bytes, i64 vec_bytes, bool line_aligned) {
  if (line_aligned) return row_bytes;
  const i64 last = kHostLineBytes - vec_bytes + row_bytes;
  return (last + kHostLineBytes - 1) / kHostLineBytes * kHostLineBytes;
}

JITKERN_HOST_DEVICE constexpr GroupShape pair_copy_shape(i64 row_bytes, i64 vec_bytes,
                                                         bool line_aligned, int in_flight) {
  const i64 bytes = window_bytes(row_bytes, vec_bytes, line_aligned);
  return group_shape(bytes, vec_bytes, in_flight, in_flight);
}

}  // namespace jitkern
