// Types of host and device, faults, and how lanes share rows. Includes no standard header, as NVRTC
// compiles it too. Users may include it.
#pragma once

#ifdef __CUDACC__
#define JITKERN_HOST_DEVICE __host__ __device__
#else
#define JITKERN_HOST_DEVICE
#endif

namespace jitkern {

using i32 = int;
using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void*) == 8, "a 64-bit platform");

// The index argument of an op that caused a fault: a number of fault_site().
enum class FaultSite : u32 {};

// A device's first out-of-range index, in pinned host memory, so that the host can read it without
// synchronising. `state` goes 0 (empty) -> 1 (being written) -> 2 (complete).
struct FaultRecord {
  u32 state;
  FaultSite site;
  i64 position;  // the index's place in its argument, flattened
  i64 value;
  i64 bound;  // the first value that is too large
};

// How the lanes of a warp share the rows of a copy. A group of `lanes` neighbouring lanes copies
// `rows` rows at a time, each lane `chunks` vectors of each; a long row is cut into `splits`. A
// lane loads all rows * chunks vectors before it stores the first.
struct GroupShape {
  int lanes;
  int chunks;
  int splits;
  int rows;

  JITKERN_HOST_DEVICE constexpr i64 num_threads(i64 num_rows) const {
    return (num_rows + rows - 1) / rows * splits * lanes;
  }
};

// A row in flight needs two pointers beside its vectors: with blocks of 1,024 threads, 8 rows do
// not fit into the 64 registers of a thread (h2d_gather of 512-byte rows: 32 GB/s, with 4 rows 50).
constexpr int kMaxRows = 4;

// The shape for rows of `row_bytes`. There are at least `splits` parts, and as many more as keep a
// lane at `in_flight` vectors or fewer. A lane takes several short rows.
JITKERN_HOST_DEVICE constexpr GroupShape group_shape(i64 row_bytes, i64 vec_bytes, int in_flight,
                                                     int splits = 1) {
  const i64 vecs = (row_bytes + vec_bytes - 1) / vec_bytes;
  int lanes = 1;
  while (lanes < 32 && lanes < vecs) lanes *= 2;
  const i64 chunks_per_row = (vecs + lanes - 1) / lanes;
  i64 chunks = (chunks_per_row + splits - 1) / splits;
  if (chunks > in_flight) chunks = in_flight;
  const i64 parts = (chunks_per_row + chunks - 1) / chunks;
  i64 rows = parts > 1 || chunks >= in_flight ? 1 : in_flight / chunks;
  if (rows > kMaxRows) rows = kMaxRows;
  return {lanes, static_cast<int>(chunks), static_cast<int>(parts), static_cast<int>(rows)};
}

}  // namespace jitkern
