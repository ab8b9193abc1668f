#include "cache_rows.h"

#include <algorithm>

namespace jitkern {

i64 bytes_from(const Tensor& tensor, int dim) {
  i64 bytes = tensor.item_bytes();
  for (int d = dim; d < tensor.dl->ndim; ++d) bytes *= tensor.dl->shape[d];
  return bytes;
}

namespace {

// The dimension of a row's heads: 2, or one further if dimensions before it have one item each.
int head_dim_of(const Tensor& pages) {
  const DLTensor& dl = *pages.dl;
  int dim = 2;
  while (dim < dl.ndim && dl.shape[dim] == 1) ++dim;
  return dim;
}

}  // namespace

CacheRows CacheRows::of(const Tensor& cache, i64 row_bytes, const Tensor& rows, int row_ndim) {
  const DLTensor& dl = *cache.dl;
  // Bytes alone do not tell pages: they took heads of [slots, heads, dim] for slots of a page.
  if (row_ndim < 1 || dl.ndim != row_ndim + 2 || row_bytes == 0 ||
      bytes_from(cache, 2) != row_bytes) {
    return CacheRows(Rows(cache));
  }
  const int64_t* const row_shape = rows.dl->shape + rows.dl->ndim - row_ndim;
  if (!std::equal(row_shape, row_shape + row_ndim - 1, dl.shape + 2)) return CacheRows(Rows(cache));
  CacheRows pages(cache, row_bytes, head_dim_of(cache));
  const bool is_flat =
      pages.num_heads == 1 && (cache.dl->shape[0] <= 1 || pages.page <= 1 ||
                               pages.block_stride == pages.page * pages.stride_bytes);
  if (!is_flat) return pages;
  const i64 stride = pages.page > 1 ? pages.stride_bytes : pages.block_stride;
  CacheRows flat(Rows(cache, pages.num_rows, row_bytes, stride));
  flat.row_dim = 2;
  return flat;
}

CacheRows::CacheRows(const Tensor& pages, i64 row_bytes, i64 head_dim)
    : Rows(pages, pages.dl->shape[0] * pages.dl->shape[1], row_bytes, 0) {
  const DLTensor& dl = *pages.dl;
  const auto stride_of = [&](int dim) {
    if (dl.shape[dim] > 1 && pages.stride(dim) < 0) pages.refuse_stride(dim);
    return dl.shape[dim] > 1 ? pages.stride(dim) * pages.item_bytes() : i64(0);
  };
  row_dim = 2;
  page = dl.shape[1];
  block_stride = stride_of(0);
  stride_bytes = stride_of(1);
  head_bytes = row_bytes;
  if (head_dim < dl.ndim) {
    head_bytes = pages.row_items(static_cast<int>(head_dim) + 1) * pages.item_bytes();
    if (stride_of(static_cast<int>(head_dim)) != head_bytes && head_bytes < row_bytes) {
      num_heads = dl.shape[head_dim];
      head_stride = stride_of(static_cast<int>(head_dim));
    } else {
      head_bytes = row_bytes;
    }
  }
  if (std::max(num_rows, page) > kMostPagedSlots) {
    value_error(str(std::max(num_rows, page), " slots in pages"), "less than 2^31");
  }
  begin = end = address(data);
  if (empty()) return;
  end += static_cast<u64>((dl.shape[0] - 1) * block_stride + (page - 1) * stride_bytes +
                          (num_heads - 1) * head_stride + head_bytes);
}

Lattice CacheRows::lattice() const {
  if (is_flat()) return Lattice(begin, row_bytes, {{{num_rows, stride_bytes}, {1, 0}, {1, 0}}});
  return Lattice(
      begin, head_bytes,
      {{{num_rows / page, block_stride}, {page, stride_bytes}, {num_heads, head_stride}}});
}

void CacheRows::distinct_rows() const {
  if (is_flat()) return Rows::distinct_rows();
  if (empty() || !lattice().has_overlap()) return;
  value_error(str("rows of ", row_bytes, " bytes that overlap (shape ", shape_text(), ")"),
              "rows apart in a tensor that is written, as those of one that was expanded are not");
}

void CacheRows::apart_from(const CacheRows& other, const char* expected) const {
  if (is_flat() && other.is_flat()) return Rows::apart_from(other, expected);
  if (empty() || other.empty() || begin >= other.end || other.begin >= end) return;
  if (lattice().overlaps(other.lattice())) value_error(str("overlaps ", other.arg), expected);
}

}  // namespace jitkern
