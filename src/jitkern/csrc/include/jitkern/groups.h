// How the lanes of a warp share the rows of a copy. Known to the kernels at compile time and to the
// host for the size of a launch.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// A group of `lanes` neighbouring lanes works on `rows` rows at a time, each lane on `chunks`
// vectors of each; a long row is cut into `splits`. All rows * chunks vectors of a lane are loaded
// before the first is stored.
struct GroupShape {
  int lanes;
  int chunks;
  int splits;
  int rows;

  JITKERN_HOST_DEVICE constexpr i64 num_groups(i64 num_rows) const {
    return (num_rows + rows - 1) / rows * splits;
  }
  JITKERN_HOST_DEVICE constexpr i64 num_threads(i64 num_rows) const {
    return num_groups(num_rows) * lanes;
  }
};

// A row in flight costs two pointers beside its vectors: 8 of them do not fit into the 64 registers
// that 1,024 threads leave to each (h2d_gather of 512-byte rows: 32 GB/s, with 4 rows 50).
constexpr int kMaxRows = 4;

// The shape for rows of `row_bytes`, cut into `splits` or into as many more as it takes for a lane
// to have at most `in_flight` vectors. Of short rows it has as many vectors, of several rows.
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
