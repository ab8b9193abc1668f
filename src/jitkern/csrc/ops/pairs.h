// Parameters of the copies that pairs of rows ask for (h2d_gather, d2h_scatter).
#pragma once

#include <jitkern/types.h>

namespace jitkern {

constexpr int kHostLineBytes = 128;  // a PCIe read request of the GPU carries one such line

// Which side of the copy is in host memory: its lines decide where lanes start.
enum HostSide : int { kHostSource, kHostTarget };

struct PairCopyParams {
  char* dst;
  const char* src;
  i64 dst_stride_bytes;
  i64 src_stride_bytes;
  const void* pairs;      // [num_pairs, 2]: source row, destination row
  const u32* last_pair;   // in device memory, -1: none; null: there are num_pairs
  u32* last_batch;        // see for_batches; may be null
  void* slot_map;         // ends with slot_map[source row] = destination row; may be null
  const void* slot_rows;  // the source rows of slot_map, if not those of `pairs`; may be null
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  i32 slot_map_bytes;  // 4 or 8: bytes of one element of slot_map
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;

  static constexpr bool kHasShifts = false;  // a row goes to one place; PeerCopyParams has others
};

// The bytes of all lines that one row can touch. Where rows are only aligned to a vector, a row may
// start up to 128 - vec_bytes bytes into its first line.
JITKERN_HOST_DEVICE constexpr i64 window_bytes(i64 row_bytes, i64 vec_bytes, bool line_aligned) {
  if (line_aligned) return row_bytes;
  const i64 last = kHostLineBytes - vec_bytes + row_bytes;
  return (last + kHostLineBytes - 1) / kHostLineBytes * kHostLineBytes;
}

}  // namespace jitkern
