// Regions of host memory, by which large calls on large pools sort their rows.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

constexpr u32 kNotListed = 0xffffffffu;
// As many as one block sums up: out of pools of 1.5 to 64 GiB, 8,192 to 1,048,576 rows come as fast
// by 4,096 regions as by up to 262,144.
constexpr u32 kNumRegions = 4096;

// A counting sort of one pass: a first kernel numbers the rows of each region as they come, `scan`
// sums up the regions, a last kernel writes each row to its place. `last_ranks` starts as all ones.
struct Regions {
  u32* last_ranks;  // [num_kinds, kNumRegions]: the last number of each region, -1: none
  u32* starts;      // the same: rows in the regions before; both at multiples of 16 bytes
  u32* last_entry;  // takes the place of the last row, -1: none
  u32 num_kinds;    // of rows, which are sorted one behind the other
  i32 shift;        // a region is 2^shift bytes of host memory
};

}  // namespace jitkern
