// How the lanes of a warp share the rows of a copy. Known to the kernels at compile time and to the
// host for the size of a launch.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// A group of `lanes` neighbouring lanes works on `rows` rows at a time, each lane on `chunks`
// vectors of each; a long row is cut into `pieces`. All rows * chunks vectors of a lane are loaded
// before the first is stored.
struct GroupShape {
  int lanes;
  int chunks;
  int pieces;
  int rows;

  JITKERN_HOST_DEVICE constexpr i64 num_groups(i64 num_rows) const {
    return (num_rows + rows - 1) / rows * pieces;
  }
  JITKERN_HOST_DEVICE constexpr i64 num_threads(i64 num_rows) const {
    return num_groups(num_rows) * lanes;
  }
};

// A row in flight costs two pointers beside its vectors: 8 of them do not fit into the 64 registers
// that 1,024 threads leave to each (h2d_gather of 512-byte rows: 32 GB/s, with 4 rows 50).
constexpr int kMaxRows = 4;

// The shape for rows of `row_bytes`: a lane has at most `max_chunks` vectors of one row, and
// `in_flight` vectors in all where rows are short.
JITKERN_HOST_DEVICE constexpr GroupShape group_shape(i64 row_bytes, i64 vec_bytes, int max_chunks,
                                                     int in_flight) {
  const i64 vecs = (row_bytes + vec_bytes - 1) / vec_bytes;
  int lanes = 1;
  while (lanes < 32 && lanes < vecs) lanes *= 2;
  const i64 chunks_per_row = (vecs + lanes - 1) / lanes;
  const i64 chunks = chunks_per_row < max_chunks ? chunks_per_row : max_chunks;
  const i64 pieces = (chunks_per_row + chunks - 1) / chunks;
  i64 rows = pieces > 1 || chunks >= in_flight ? 1 : in_flight / chunks;
  if (rows > kMaxRows) rows = kMaxRows;
  return {lanes, static_cast<int>(chunks), static_cast<int>(pieces), static_cast<int>(rows)};
}

}  // namespace jitkern
