// Parameters of the kernels that sort and copy rows by pairs (h2d_gather, d2h_scatter, indexing).
#pragma once

#include <jitkern/types.h>

namespace jitkern {

constexpr int kHostLineBytes = 128;  // the largest PCIe read of a GPU

// The side of a copy that is in host memory. Lanes start at its 128-byte lines.
enum HostSide : int { kHostSource, kHostTarget };

struct PairCopyParams {
  char* dst;
  const char* src;
  i64 dst_stride_bytes;
  i64 src_stride_bytes;
  const void* pairs;     // [num_pairs, 2]: source row, destination row
  const u32* last_pair;  // number of the last pair, on the GPU; -1: no pairs; null: num_pairs - 1
  u32* last_batch;       // see for_batches(); may be null
  void* slot_map;        // slot_map[source row] becomes the destination row; may be null
  i64 num_pairs;
  i64 num_src_rows;
  i64 num_dst_rows;
  i32 slot_map_bytes;  // 4 or 8 per element
  FaultSite src_site;
  FaultSite dst_site;
  FaultRecord* fault;

  // PeerCopyParams has both: further destinations, and pairs that are mostly padding.
  static constexpr bool kHasShifts = false;
  static constexpr bool kHasBatches = false;
};

// The bytes of the lines that a row can touch. An unaligned row may start 128 - vec_bytes into its
// first line.
JITKERN_HOST_DEVICE constexpr i64 window_bytes(i64 row_bytes, i64 vec_bytes, bool line_aligned) {
  if (line_aligned) return row_bytes;
  const i64 last = kHostLineBytes - vec_bytes + row_bytes;
  return (last + kHostLineBytes - 1) / kHostLineBytes * kHostLineBytes;
}

constexpr u32 kNotListed = 0xffffffffu;
constexpr u32 kNoOwner = 0xffffffffu;
// One block scans 4,096 counts. Up to 262,144 regions are no faster (8,192 to 1,048,576 rows, pools
// of 1.5 to 64 GiB).
constexpr u32 kNumRegions = 4096;

// A counting sort of rows by region of host memory. Three kernels: rank each row in its region,
// scan the counts of the regions, write each row to its place.
struct Regions {
  u32* last_ranks;  // [kNumRegions]: last rank taken; initially -1
  u32* starts;      // the same shape: rows in earlier regions; both 16-byte aligned
  u32* last_entry;  // set by the scan: the place of the last row; -1: no rows
  i32 shift;        // a region is 2^shift bytes of host memory
};

// Splits a large call's pairs into two lists. `fetches` cross PCIe, in either direction. `copies`
// are within device memory: repeated source rows.
struct ListParams : PairCopyParams {
  u32* table;         // hash table: source row to the pair that fetches it; initially -1; null:
                      // repeats are fetched too
  u32 table_mask;     // the size of the table, a power of two, minus 1
  u32* last_entries;  // [2]: the number of each list's last entry; initially -1
  void* fetches;      // [num_pairs, 2]: source row, destination row
  void* copies;       // [num_pairs, 2]: destination row to copy from, destination row
  u32* ranks;         // [num_pairs]: rank of a fetch in its region, or kNotListed; null: not sorted
  Regions regions;
};

}  // namespace jitkern
