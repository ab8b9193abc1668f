// store_cache on the host: checks, CPU implementation, launch.
#include "store_host.h"

#include "store.h"

#include <jitkern/launch.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache_rows.h"
#include "host/cpu_copy.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "store_cache";
constexpr const char* kOwnMemoryOrNone =
    "memory of its own; for a single cache give None as v_cache and v";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

// A cache and the rows to store in it.
struct Table {
  CacheRows cache;
  Rows rows;

  Table(const CacheRows& cache, const Rows& rows) : cache(cache), rows(rows) {}
  Table(const Tensor& cache, const Tensor& rows)
      : cache(CacheRows::of(cache, bytes_from(rows, 1), rows, rows.dl->ndim - 1)),
        rows(rows, 1, kCopyForReads) {}
  Table(const char* cache_arg, AnyView cache, const char* rows_arg, AnyView rows)
      : Table(Tensor(kOp, cache_arg, cache), Tensor(kOp, rows_arg, rows)) {}

  StoreParams::Copy copy() const {
    return {cache.data, rows.data, cache.strides(), rows.stride_bytes};
  }

  // What to pass instead of rows of another size than the cache's.
  std::string hint() const {
    const DLTensor &pages = *cache.dl, &values = *rows.dl;
    if (pages.ndim < 4) return slot_note();
    if (bytes_from(cache, 2) == rows.row_bytes) {
      std::vector<int64_t> shape(pages.shape + 1, pages.shape + pages.ndim);
      shape[0] = values.shape[0];
      return "; for [blocks, page, ...] pass shape " + shape_text(shape.data(), shape.size());
    }
    const bool is_hnd = pages.ndim == 4 && values.ndim == 3 && pages.shape[1] == values.shape[1] &&
                        pages.shape[3] == values.shape[2];
    return is_hnd ? "; for [blocks, heads, page, dim] pass .transpose(1, 2)" : slot_note();
  }

  // A cache with one dimension more than the rows was meant as pages.
  std::string slot_note() const {
    const DLTensor& pages = *cache.dl;
    if (pages.ndim < 3 || pages.ndim != rows.dl->ndim + 1) return "";
    return str("; read as pages, a slot of ", cache.arg, " is ",
               shape_text(pages.shape + 2, pages.ndim - 2));
  }

  void check(const Rows& k_cache, const Indices& indices) const {
    rows.same_device(k_cache);
    if (rows.row_bytes != cache.row_bytes) rows.same_row_bytes(cache, hint().c_str());
    rows.one_per_index(indices);
    cache.distinct_rows();
    if (cache.is_flat()) {
      indices.apart_from(cache);
      rows.apart_from(cache);
    } else {
      CacheRows(indices).apart_from(cache);
      CacheRows(rows).apart_from(cache);
    }
  }
};

[[noreturn]] void raise_one_is_none(const char* arg, const char* other) {
  raise_type_error(kOp, arg, nullptr,
                   str("a tensor along with ", other, ", or None as both for a single cache"));
}

// Copies equally spaced rows of one size. K and V take turns, so that each index is read from
// memory once: row 2 i is K, 2 i + 1 is V. The number of copies is a constant: as a variable it
// takes 4 to 9 % more instructions.
template <int kCopies>
void store_flat(const Indices& indices, const StoreParams& p, const StoreParams::Copy* copies,
                i64 row_bytes) {
  indices.with_index([&](const auto index_at) {
    copy_rows(kCopies * p.num_rows, row_bytes, [&p, index_at, copies](i64 row) -> CpuRow {
      const i64 i = row / kCopies;
      const i64 slot = index_at(i);
      const StoreParams::Copy& copy = copies[row % kCopies];
      const bool inside = is_below(slot, p.num_slots) && slot != p.skip;
      return {inside ? copy.cache + slot * copy.strides.slot_stride : nullptr,
              copy.rows + i * copy.row_stride_bytes};
    });
  });
}

void store_in_pages(const Indices& indices, const StoreParams& p, const Table& table) {
  const CacheRows& cache = table.cache;
  indices.with_index([&](const auto index_at) {
    for (i64 i = 0; i < p.num_rows; ++i) {
      const i64 slot = index_at(i);
      if (!is_below(slot, p.num_slots) || slot == p.skip) continue;
      for (i64 head = 0; head < cache.num_heads; ++head) {
        std::memcpy(cache.row(slot) + head * cache.head_stride,
                    table.rows.data + i * table.rows.stride_bytes + head * cache.head_bytes,
                    static_cast<size_t>(cache.head_bytes));
      }
    }
  });
}

void store_cpu(const Indices& indices, const StoreParams& p, const Table& first,
               const Table& last) {
  if (last.cache.row_bytes == 0) return;
  check_indices(indices, p.num_slots, p.skip);
  const bool is_pair = &first != &last;
  const bool both_flat = first.cache.is_flat() && last.cache.is_flat();
  if (is_pair && both_flat && first.cache.row_bytes == last.cache.row_bytes) {
    return store_flat<2>(indices, p, p.copies, last.cache.row_bytes);
  }
  for (int t = 0; t < (is_pair ? 2 : 1); ++t) {
    const Table& table = t == 0 ? first : last;
    if (table.cache.is_flat()) {
      store_flat<1>(indices, p, p.copies + t, table.cache.row_bytes);
    } else {
      store_in_pages(indices, p, table);
    }
  }
}

// Rows of two sizes: see StoreKernel::run.
void launch_two_sizes(KernelTable& table, const LaunchScope& scope, const Spec& spec,
                      StoreParams& params) {
  if (params.num_rows == 0) return;
  params.fault = scope.device.fault_device;
  const LoadedKernels& kernels = table.find(scope.device, spec);
  const Kernel& kernel = kernels.entries[0];
  const GroupShape first = group_shape(spec[3], spec[1], kernels.in_flight);
  const auto blocks = [&](const GroupShape& shape) {
    return ceil_div(shape.num_threads(params.num_rows), kernel.num_threads);
  };
  params.first_blocks = static_cast<u32>(blocks(first));
  scope.launch(kernel, blocks(first) + blocks(kernels.shape), params);
}

// Launches one kernel for `first`, or for `first` and the `last`, whose rows are no shorter.
void launch_store(const LaunchScope& scope, StoreParams params, int index_bytes, const Table& first,
                  const Table& last) {
  static KernelTable kernels(
      kOp, {"row_bytes", "vec_bytes", "index_bytes", "first_row_bytes", "paged", "head_bytes"},
      row_shape);
  if (&first == &last) params.copies[0] = last.copy();
  const CacheRows& cache = last.cache;
  const u64 bits = address(first.cache.data) | address(last.cache.data) |
                   first.cache.stride_bits() | last.cache.stride_bits() | address(first.rows.data) |
                   address(last.rows.data) |
                   static_cast<u64>(first.rows.stride_bytes | last.rows.stride_bytes);
  const Spec spec(cache.row_bytes, widest_vec(bits), index_bytes, first.cache.row_bytes,
                  !cache.is_flat(), cache.head_bytes);
  if (first.cache.row_bytes != cache.row_bytes) {
    return launch_two_sizes(kernels, scope, spec, params);
  }
  launch_rows(kernels, scope, spec, params.num_rows, params, &first == &last ? 1 : 2);
}

// Whether one kernel stores both.
bool share_kernel(const CacheRows& a, const CacheRows& b) {
  if (a.is_flat() && b.is_flat()) return true;
  return a.is_flat() == b.is_flat() && a.row_bytes == b.row_bytes && a.head_bytes == b.head_bytes;
}

// `v`: none for a single cache. kSecond, the second half of a call that PyTorch split, leaves
// earlier faults to the next call.
enum class Half { kNone, kSecond };
void store_tables(const Table& k, const std::optional<Table>& v, const Indices& indices, i64 skip,
                  FaultSite site, Half half = Half::kNone) {
  indices.same_device(k.cache);
  if (indices.dl->ndim != 1) indices.shape_error("1 dimension");
  k.check(k.cache, indices);
  if (v) {
    v->cache.same_device(k.cache);
    v->cache.same_num_rows(k.cache);
    v->check(k.cache, indices);
    v->cache.apart_from(k.cache, k.cache.op == kOp ? kOwnMemoryOrNone : kOwnMemory);
    CacheRows(k.rows).apart_from(v->cache);
    CacheRows(v->rows).apart_from(k.cache);
  }

  // Shorter rows come first; rows of 0 bytes are left out.
  const Table* first = &k;
  const Table* last = v ? &*v : &k;
  if (last->cache.row_bytes < first->cache.row_bytes) std::swap(first, last);
  if (first->cache.row_bytes == 0) first = last;
  StoreParams params{{first->copy(), last->copy()},
                     indices.data,
                     indices.count,
                     k.cache.num_rows,
                     skip,
                     0,
                     site,
                     nullptr};
  if (!k.cache.on_cuda()) return store_cpu(indices, params, *first, *last);
  Device& device = Device::get(k.cache.ordinal());
  if (half != Half::kSecond) check_pending_fault(device);
  const LaunchScope scope(device, current_stream(device.ordinal));
  if (share_kernel(first->cache, last->cache)) {
    return launch_store(scope, params, indices.index_bytes, *first, *last);
  }
  launch_store(scope, params, indices.index_bytes, *first, *first);
  launch_store(scope, params, indices.index_bytes, *last, *last);
}

Indices indices_arg(AnyView value) {
  const Tensor indices(kOp, "indices", value);
  if (indices.dl->dtype.code != kDLInt) {
    indices.dtype_error("int32 or int64, in the order (k_cache, v_cache, indices, k, v)");
  }
  return Indices(indices);
}

// v_cache and v are None for a single cache.
void store(AnyView k_cache, AnyView v_cache, AnyView indices, AnyView k_rows, AnyView v_rows,
           AnyView skip) {
  const Table k("k_cache", k_cache, "k", k_rows);
  const Indices checked_indices = indices_arg(indices);
  std::optional<Table> v;
  if (!is_none(v_cache) || !is_none(v_rows)) {
    if (is_none(v_cache)) raise_one_is_none("v_cache", "v");
    if (is_none(v_rows)) raise_one_is_none("v", "v_cache");
    v.emplace("v_cache", v_cache, "v", v_rows);
  }
  k.rows.same_dtype(k.cache);
  if (v) {
    v->cache.same_dtype(k.cache);
    v->rows.same_dtype(k.cache);
  }
  store_tables(k, v, checked_indices, skip_arg(kOp, skip), kIndicesSite);
}

// The second half of a call that PyTorch split; messages name v_cache.
void store_v(AnyView v_cache, AnyView indices, AnyView v, AnyView skip) {
  const Table table("v_cache", v_cache, "v", v);
  table.rows.same_dtype(table.cache);
  store_tables(table, std::nullopt, indices_arg(indices), skip_arg(kOp, skip), kIndicesSite,
               Half::kSecond);
}

JITKERN_EXPORT_OP(store_cache, store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_v_cache_now, store_v);

// DeepSeek's rows without the name of their format.
std::string format_note(const Tensor& cache) {
  if (cache.dl->ndim < 2 || bytes_from(cache, cache.dl->ndim - 1) != 656) return "";
  return "; without format= the parts are stored as they are (rows of 656 bytes: "
         "format='fp8_ds_mla')";
}

// The bytes of a cache's rows that a part is stored in.
CacheRows bytes_of_rows(const CacheRows& cache, i64 offset, i64 bytes) {
  CacheRows part = cache;
  part.data += offset;
  part.begin += static_cast<u64>(offset);
  part.end -= static_cast<u64>(cache.row_bytes - offset - bytes);
  part.row_bytes = part.head_bytes = bytes;
  return part;
}

}  // namespace

void check_indices(const Indices& indices, i64 num_slots, i64 skip) {
  if (skip < num_slots) return indices.check_below(num_slots);
  indices.with_index([&](const auto index_at) {
    for (i64 i = 0; i < indices.count; ++i) {
      const i64 index = index_at(i);
      if (index < num_slots || index == skip) continue;
      raise_index_error(indices.op, indices.arg, i, index, num_slots);
    }
  });
}

void store_parts(const Tensors& caches, const Indices& indices, const Tensors& parts, i64 skip,
                 FaultSite site) {
  if (caches.size() == 2) {
    const Table k(caches[0], parts[0]);
    return store_tables(k, Table(caches[1], parts[1]), indices, skip, site);
  }
  if (parts.size() == 1) {
    return store_tables(Table(caches[0], parts[0]), std::nullopt, indices, skip, site);
  }
  const i64 first_bytes = bytes_from(parts[0], 1), last_bytes = bytes_from(parts[1], 1);
  const CacheRows cache =
      CacheRows::of(caches[0], first_bytes + last_bytes, parts[0], parts[0].dl->ndim - 1);
  if (cache.row_bytes != first_bytes + last_bytes) {
    cache.value_error(str("rows of ", cache.row_bytes, " bytes (shape ", cache.shape_text(), ")"),
                      str(first_bytes + last_bytes, " bytes, those of the parts together",
                          format_note(caches[0])));
  }
  if (cache.num_heads > 1) {
    cache.value_error(str("rows that are not contiguous (shape ", cache.shape_text(), ")"),
                      "contiguous rows");
  }
  cache.distinct_rows();
  const Table first(bytes_of_rows(cache, 0, first_bytes), Rows(parts[0], 1, kCopyForReads));
  const Table last(bytes_of_rows(cache, first_bytes, last_bytes), Rows(parts[1], 1, kCopyForReads));
  store_tables(first, last, indices, skip, site);
}

}  // namespace jitkern
