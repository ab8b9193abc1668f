// Rows of bytes at several strides, and whether they overlap.
#pragma once

#include <jitkern/types.h>

#include <array>

namespace jitkern {

// Rows of bytes at up to three strides: row (i, j, k) begins at begin + i * dims[0].stride +
// j * dims[1].stride + k * dims[2].stride.
struct Lattice {
  struct Dim {
    i64 count;
    i64 stride;  // in bytes, 0 or more
  };

  u64 begin;
  u64 end;  // after the last row
  i64 row_bytes;
  std::array<Dim, 3> dims;  // from the longest stride to the shortest

  // There is a row, of one byte or more.
  Lattice(u64 begin, i64 row_bytes, const std::array<Dim, 3>& sizes);

  // Whether two of its rows share a byte.
  bool has_overlap() const;
  // Whether a row shares a byte with a row of `other`.
  bool overlaps(const Lattice& other) const;
};

}  // namespace jitkern
