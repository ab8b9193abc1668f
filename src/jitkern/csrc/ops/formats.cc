#include "formats_host.h"

#include <tvm/ffi/container/array.h>

#include <string>

namespace jitkern {

namespace {

constexpr int kCut = 128;
constexpr i64 kMostOfHead = 2048;  // values: more would fill a lane's registers
constexpr int kMostElems = 16;  // values of a lane's vector: with 8 a store took 1.35 times as long
constexpr i64 kMostThreads = (1ll << 32) - 1024;  // kernels number threads in 32 bits

void require_rows(const Tensor& tensor, i64 num_rows, const Indices& indices) {
  if (num_rows == indices.count) return;
  tensor.value_error(str(num_rows, " rows (shape ", tensor.shape_text(), ")"),
                     str(indices.count, " rows, one for each index in ", indices.arg));
}

// Contiguous rows as [rows, groups] of `group_bytes`.
Grid groups_of(const Tensor& values, i64 group_bytes) {
  Grid grid(values, 0, 0, 1);
  grid.inner = grid.row_bytes / group_bytes;
  grid.inner_stride = grid.row_bytes = group_bytes;
  grid.end = grid.begin;
  if (!grid.empty()) {
    grid.end += static_cast<u64>((grid.outer - 1) * grid.outer_stride + grid.inner * group_bytes);
  }
  return grid;
}

// Values as [rows, groups]. The groups of a format without a size of groups are heads.
Grid grid_of(const Tensor& values, int group, bool is_given, bool lacks_rest) {
  const DLTensor& dl = *values.dl;
  if (group == 0 && dl.ndim == 3) return Grid(values, 0, 1, 2);
  if (group == 0 && dl.ndim != 2) values.shape_error("[rows, heads, dim] or [rows, dim]");
  if (dl.ndim < 2) values.shape_error("[rows, dim]");
  const i64 row_bytes = bytes_from(values, 1);
  // A row without heads that has one given scale is cut into groups, of any size.
  const bool is_cut = group == 0 && is_given && row_bytes % (kCut * values.item_bytes()) == 0;
  const int cut = is_cut ? kCut : group;
  const i64 group_bytes = cut == 0 ? row_bytes : cut * values.item_bytes();
  if (group == 0 && row_bytes == 0) values.shape_error("rows of 1 value or more");
  if (row_bytes == 0 || row_bytes % group_bytes != 0) {
    const i64 rest = row_bytes / values.item_bytes() % group;
    const i64 whole = row_bytes / values.item_bytes() - rest;
    const std::string split = str(values.arg, ".split([", whole, ", ", rest, "], dim=1)");
    const bool fits_two = lacks_rest && whole > 0;
    values.shape_error(str("rows of a multiple of ", group, " values",
                           fits_two ? "; give two, such as " + split : ""));
  }
  return groups_of(values, group_bytes);
}

// Values as rows of a cache whose blocks are rows of values.
CacheRows rows_of(const Grid& values) {
  CacheRows rows(Rows(values, values.outer * values.inner, values.row_bytes, values.inner_stride));
  rows.page = values.inner;
  rows.block_stride = values.outer_stride;
  rows.end = values.end;
  return rows;
}

// Equally spaced slots count as pages of one slot.
CacheStrides as_pages(const CacheRows& rows, i64 head_stride) {
  if (!rows.is_flat()) {
    CacheStrides strides = rows.strides();
    strides.head_stride = rows.num_heads > 1 ? rows.head_stride : head_stride;
    return strides;
  }
  if (rows.num_rows > kMostPagedSlots) {
    rows.value_error(str(rows.num_rows, " slots"), "less than 2^31");
  }
  return {rows.stride_bytes, 0, head_stride, Divisor::of(1)};
}

u64 bits_of(const CacheStrides& strides) {
  return static_cast<u64>(strides.block_stride | strides.slot_stride | strides.head_stride);
}

void require_one_byte(const Tensor& cache) {
  if (cache.item_bytes() != 1) cache.dtype_error("uint8, or another dtype of one byte");
}

// One or two tensors of an argument, or none of an optional one. A tensor alone has the argument's
// name.
Tensors tensors_of(const char* op, const ListArg& arg, AnyView value, bool is_optional = false) {
  Tensors tensors;
  if (is_optional && is_none(value)) return tensors;
  const auto* list = value.as<tvm::ffi::ArrayObj>();
  if (list == nullptr) {
    tensors.emplace_back(op, arg.name, value);
    return tensors;
  }
  const int size = static_cast<int>(list->size());
  if (size > 2 || (size == 0 && !is_optional)) {
    raise_value_error(op, arg.name, str("a list of ", size), "a tensor, or a list of one or two");
  }
  for (int i = 0; i < size; ++i) {
    tensors.emplace_back(op, size == 1 ? arg.name : arg.items[i], list->at(i));
  }
  return tensors;
}

constexpr ListArg kCaches{"cache", {"cache[0]", "cache[1]"}};
constexpr ListArg kScales{"scales", {"scales[0]", "scales[1]"}};

}  // namespace

RowsArgs::RowsArgs(const char* op, const ListArg& rows_arg, AnyView caches_arg, AnyView rows_value,
                   AnyView scales_arg, int format)
    : caches(tensors_of(op, kCaches, caches_arg)),
      rows(tensors_of(op, rows_arg, rows_value)),
      scales(tensors_of(op, kScales, scales_arg, true)) {
  if (caches.size() == 2 && rows.size() != 2) {
    raise_value_error(op, rows_arg.name, "one tensor", "two, one for each cache");
  }
  if (format == kNoFormat && scales.size() > 0) {
    scales[0].value_error("given without a format", "None");
  }
}

void RowsArgs::add_to(FormatCall& call) const {
  const ScalePlace place = call.row.place;
  const bool has_scales = place == ScalePlace::kGiven || place == ScalePlace::kInTensor;
  const int expected = has_scales ? caches.size() : 0;
  if (scales.size() != expected) {
    const char* const counts[] = {"None", "one tensor", "two tensors"};
    raise_value_error(
        call.op, "scales", counts[scales.size()],
        expected == 0 ? "None: the scales of this format lie in the cache" : "one for each cache");
  }
  std::optional<Rows> rest;
  if (rows.size() > caches.size()) {
    if (!call.row.has_rest) {
      rows[1].value_error("given", "one tensor: this format has no bytes beside the values");
    }
    rest.emplace(rows[1]);
  }
  for (int t = 0; t < caches.size(); ++t) {
    call.add({caches[t], rows[t], rest, has_scales ? &scales[t] : nullptr});
  }
}

FormatCall::FormatCall(const char* op, int format, const Indices& indices, bool writes_cache)
    : op(op),
      format(format),
      row(row_format(format)),
      indices(indices),
      writes_cache(writes_cache) {
  if (indices.dl->ndim != 1) indices.shape_error("1 dimension");
  params.indices = indices.data;
  params.num_rows = indices.count;
  params.skip = -1;
  params.rule = row.rule;
  uses(indices, false);
}

void FormatCall::add(const FormatSide& side) {
  const bool from_host = !writes_cache && !side.cache.on_cuda() && indices.on_cuda();
  const Tensor& home = from_host ? static_cast<const Tensor&>(indices) : side.cache;
  if (!from_host) indices.same_device(side.cache);
  side.values.same_device(home);
  const int type = float_type(side.values);
  const Grid values = grid_of(side.values, row.group, row.is_given(), row.has_rest && !side.rest);
  require_rows(side.values, values.outer, indices);
  FormatShape shape{values.inner, values.row_bytes / values.item_bytes(), 0, type};
  if (shape.group == 0 || shape.groups == 0) side.values.shape_error("rows of 1 value or more");
  if (shape.group > kMostOfHead) {
    side.values.shape_error(str("heads of ", kMostOfHead, " values or fewer"));
  }

  FormatTable& table = params.tables[num_tables];
  table.values = values.data;
  table.values_row_stride = values.outer_stride;
  table.values_group_stride = values.inner_stride;
  if (side.rest) {
    side.rest->same_device(home);
    require_rows(*side.rest, side.rest->num_rows, indices);
    shape.rest_bytes = side.rest->row_bytes;
    table.rest = side.rest->data;
    table.rest_row_stride = side.rest->stride_bytes;
  }
  require_one_byte(side.cache);
  const CacheRows cache = set_cache(side, shape, table);
  std::optional<CacheRows> scales;
  if (side.scales != nullptr) scales = set_scales(side, shape, cache, table);
  if (row.scale_bytes == 4 && (address(table.scales) | bits_of(table.scale_strides)) % 4 != 0) {
    (side.scales != nullptr ? *side.scales : side.cache)
        .value_error("scales that are not aligned to 4 bytes",
                     "an address and strides that are multiples of 4 bytes");
  }
  uses(cache, writes_cache);
  uses(rows_of(values), !writes_cache);
  if (side.rest) uses(*side.rest, !writes_cache);
  if (scales) uses(*scales, writes_cache && !row.is_given());
  shapes[num_tables++] = shape;
}

// The cache's rows, and where values and scales lie in it.
CacheRows FormatCall::set_cache(const FormatSide& side, const FormatShape& shape,
                                FormatTable& table) {
  const Tensor& cache = side.cache;
  const i64 payload = shape.groups * shape.group, scales = shape.groups * row.scale_bytes;
  const i64 expected =
      payload + shape.rest_bytes +
      (row.place == ScalePlace::kInRow || row.place == ScalePlace::kInPage ? scales : 0);
  const bool has_heads = row.group == 0 && side.values.dl->ndim == 3;
  CacheRows rows = CacheRows::of(cache, expected, side.values, has_heads ? 2 : 1);
  if (rows.row_bytes != expected) {
    const bool is_paged = cache.dl->ndim == (has_heads ? 4 : 3) && bytes_from(cache, 2) != expected;
    const i64 row_bytes = is_paged ? bytes_from(cache, 2) : rows.row_bytes;
    if (row.has_rest && !side.rest && row_bytes > expected) {
      side.values.value_error(
          str(expected, " bytes per row in this format (shape ", side.values.shape_text(), ")"),
          str(row_bytes, " as in ", cache.arg, " (shape ", cache.shape_text(),
              "); give a second tensor of ", row_bytes - expected, " bytes per row"));
    }
    cache.value_error(
        str("rows of ", row_bytes, " bytes (shape ", cache.shape_text(), ")"),
        str(expected, " bytes for ", side.values.arg, " (shape ", side.values.shape_text(), ")",
            side.rest ? str(" and ", side.rest->arg, " (", side.rest->dtype_name(), ", shape ",
                            side.rest->shape_text(), ")")
                      : std::string()));
  }
  if (rows.num_heads > 1 && (rows.num_heads != shape.groups || shape.rest_bytes > 0 ||
                             row.place == ScalePlace::kInRow || row.place == ScalePlace::kInPage)) {
    cache.value_error(str("rows that are not contiguous (shape ", cache.shape_text(), ")"),
                      "contiguous rows");
  }
  table.payload = rows.on_cuda() || !indices.on_cuda() ? rows.data : address_on_gpu(rows);
  table.strides = as_pages(rows, shape.group);
  table.rest_offset = payload + scales;
  if (row.place == ScalePlace::kInRow) {
    table.scales = table.payload + payload;
    table.scale_strides = table.strides;
    table.scale_strides.head_stride = row.scale_bytes;
  }
  if (row.place == ScalePlace::kInPage) {
    const DLTensor& dl = *cache.dl;
    const bool has_pages = dl.ndim == 3 && dl.shape[2] == expected;
    if (!has_pages) cache.shape_error(str("[num_blocks, page, ", expected, "]"));
    const i64 page = dl.shape[1];
    if (page > 1 && cache.stride(1) != expected) {
      cache.value_error(str("stride ", cache.stride(1), " of dimension 1"),
                        str("contiguous pages, stride ", expected));
    }
    const i64 block = dl.shape[0] > 1 ? cache.stride(0) : page * expected;
    const Divisor divisor = Divisor::of(static_cast<u32>(std::max<i64>(page, 1)));
    table.strides = {block, payload, shape.group, divisor};
    table.scales = table.payload + page * payload;
    table.scale_strides = {block, scales, row.scale_bytes, divisor};
  }
  if (first_cache_) {
    cache.same_device(*first_cache_);
    rows.same_num_rows(*first_cache_);
  } else {
    params.num_slots = rows.num_rows;
    first_cache_ = rows;
  }
  u64 bits = address(table.payload) | bits_of(table.strides) | static_cast<u64>(shape.group);
  if (shape.rest_bytes > 0) {
    bits |= address(table.rest) |
            static_cast<u64>(table.rest_row_stride | table.rest_offset | shape.rest_bytes);
  }
  bits_[num_tables] = bits;
  return rows;
}

// The rows of scales in a tensor of their own, and where they lie.
CacheRows FormatCall::set_scales(const FormatSide& side, const FormatShape& shape,
                                 const CacheRows& cache, FormatTable& table) const {
  const Tensor& scales = *side.scales;
  if (!scales.has_dtype(kDLFloat, 32)) scales.dtype_error("float32");
  if (row.is_given()) {
    scales.same_device(side.values);
    const i64 count = scales.numel();
    const i64 heads = side.values.dl->ndim == 3 ? shape.groups : 1;
    if (count != 1 && (count != heads || scales.dl->ndim != 1)) {
      scales.shape_error(str("1 element, or one for each of ", heads, " heads"));
    }
    if (count > 1 && scales.stride(0) < 0) scales.refuse_stride(0);
    table.scales = scales.data();
    table.scale_strides.head_stride = count == 1 ? 0 : scales.stride(0) * 4;
    return Rows(scales, count, 4, table.scale_strides.head_stride);
  }
  scales.same_device(side.cache);
  const CacheRows rows = CacheRows::of(scales, shape.groups * 4, side.values, 1);
  if (rows.row_bytes != shape.groups * 4) {
    scales.shape_error(
        str("[num_slots, ", shape.groups, "] or [num_blocks, page, ", shape.groups, "]"));
  }
  rows.same_num_rows(cache);
  table.scales = rows.on_cuda() || !indices.on_cuda() ? rows.data : address_on_gpu(rows);
  table.scale_strides = as_pages(rows, 4);
  return rows;
}

void FormatCall::uses(const CacheRows& rows, bool is_written) {
  if (is_written) rows.distinct_rows();
  for (int i = 0; i < written_.size(); ++i) rows.apart_from(written_[i]);
  for (int i = 0; is_written && i < read_.size(); ++i) read_[i].apart_from(rows);
  (is_written ? written_ : read_).emplace_back(rows);
}

// The most values of a vector by which table `t` can be read and written.
int FormatCall::most_elems(int t) const {
  const FormatTable& table = params.tables[t];
  const int item = static_cast<int>(item_bytes_of(shapes[t].type));
  const u64 values =
      address(table.values) | static_cast<u64>(table.values_row_stride | table.values_group_stride);
  const int vec_bytes = widest_vec(values);
  const int elems = vec_bytes < 16 ? std::max(vec_bytes / item, 1) : kMostElems;
  return std::min(elems, widest_vec(bits_[t]));
}

// Compiles the kernel of table `t`. ValueError if it would need too many threads.
FormatCall::Launch FormatCall::prepare(KernelTable& table, const Device& device, int t,
                                       int elems) const {
  const FormatShape& shape = shapes[t];
  const FormatLanes lanes(static_cast<int>(shape.groups), static_cast<int>(shape.group),
                          shape.rest_bytes, elems);
  if (params.num_rows * lanes.of_row > kMostThreads) {
    indices.value_error(str(params.num_rows, " indices"),
                        str(kMostThreads / lanes.of_row, " or fewer in a call"));
  }
  const Spec spec(format, shape.groups, shape.group, shape.rest_bytes, shape.type, elems,
                  indices.index_bytes);
  const Kernel& kernel = table.find(device, spec).entries[0];
  return {&kernel, ceil_div(params.num_rows * lanes.of_row, kernel.num_threads)};
}

void FormatCall::launch(KernelTable& table, const LaunchScope& scope) {
  if (params.num_rows == 0) return;
  params.fault = scope.device.fault_device;
  const bool is_pair = num_tables == 2;
  if (!is_pair || shapes[0] == shapes[1]) {
    const int elems = is_pair ? std::min(most_elems(0), most_elems(1)) : most_elems(0);
    const Launch both = prepare(table, scope.device, 0, elems);
    return scope.launch(*both.kernel, both.num_blocks, params, num_tables);
  }
  // Both are compiled before the first one writes.
  const Launch first = prepare(table, scope.device, 0, most_elems(0));
  const Launch second = prepare(table, scope.device, 1, most_elems(1));
  scope.launch(*first.kernel, first.num_blocks, params);
  params.tables[0] = params.tables[1];
  scope.launch(*second.kernel, second.num_blocks, params);
}

}  // namespace jitkern
