// Rows of a KV cache, as equally spaced slots or in pages, on the host.
#pragma once

#include <jitkern/check.h>

#include "cache_strides.h"
#include "lattice.h"

namespace jitkern {

// The bytes of the dimensions from `dim` on.
i64 bytes_from(const Tensor& tensor, int dim);

constexpr i64 kMostPagedSlots = (1ll << 31) - 1;  // kernels have 31 bits for slots of pages

// Rows of a cache: [slots, ...], or in pages [blocks, page, ...], where block * page + offset is
// the slot. Blocks of pages, and the heads of a row in them, may lie at any distance: NHD, HND as a
// transposed view, K and V interleaved.
struct CacheRows : Rows {
  int row_dim = 1;       // the first dimension of a row: 2 in pages
  i64 page = 0;          // slots of a block; 0: all rows are equally spaced
  i64 block_stride = 0;  // in bytes
  i64 num_heads = 1;     // pieces of a row that is not contiguous
  i64 head_bytes;
  i64 head_stride = 0;

  CacheRows(const Rows& rows) : Rows(rows), head_bytes(rows.row_bytes) {}
  // All indices as one row.
  CacheRows(const Indices& indices)
      : CacheRows(Rows(indices, 1, indices.count * indices.index_bytes, 0)) {}

  // Rows for ones of `row_bytes`, whose shape is the last `row_ndim` dimensions of `rows`: pages if
  // dimensions 2 on have this shape and size. The last dimension may differ, as dtypes and parts
  // do. ValueError if a row is contiguous neither as a whole nor, in pages, by heads.
  static CacheRows of(const Tensor& cache, i64 row_bytes, const Tensor& rows, int row_ndim);

  bool is_flat() const { return page == 0; }
  CacheStrides strides() const {
    return {block_stride, stride_bytes, head_stride,
            is_flat() ? Divisor{} : Divisor::of(static_cast<u32>(page))};
  }
  // All strides, for the width of vectors.
  u64 stride_bits() const {
    return static_cast<u64>(stride_bytes | block_stride | head_stride | head_bytes);
  }
  char* row(i64 slot) const {
    if (is_flat()) return data + slot * stride_bytes;
    return data + slot / page * block_stride + slot % page * stride_bytes;
  }
  // As those of Rows and Indices.
  void distinct_rows() const;
  void apart_from(const CacheRows& other, const char* expected = kOwnMemory) const;

 private:
  CacheRows(const Tensor& pages, i64 row_bytes, i64 head_dim);
  Lattice lattice() const;
};

}  // namespace jitkern
