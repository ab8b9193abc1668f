// store_cache on the host: checks, CPU implementation, launch.
#include "store.h"

#include <jitkern/launch.h>

#include <optional>
#include <string>
#include <utility>

#include "host/cpu_copy.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "store_cache";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

// A cache and the rows to store in it.
struct Table {
  Rows cache;
  Rows rows;

  Table(const char* cache_arg, AnyView cache, const char* rows_arg, AnyView rows)
      : cache(kOp, cache_arg, cache), rows(kOp, rows_arg, rows) {}

  StoreParams::Copy copy() const {
    return {cache.data, rows.data, cache.stride_bytes, rows.stride_bytes};
  }

  void check(const Rows& k_cache, const Indices& indices) const {
    rows.same_device(k_cache);
    rows.same_dtype(k_cache);
    if (rows.row_bytes != cache.row_bytes) refuse_pages();
    rows.same_row_bytes(cache);
    rows.one_per_index(indices);
    cache.distinct_rows();
    indices.apart_from(cache);
    rows.apart_from(cache);
  }

  // ValueError with the fix if a row of the cache may be a page of slots. Paged caches are not
  // guessed: [heads, slots, dim] looks the same if there are as many heads as slots.
  void refuse_pages() const {
    const DLTensor& dl = *cache.dl;
    if (dl.ndim < 3 || dl.shape[1] * rows.row_bytes != cache.row_bytes) return;
    std::string slots = ".view(-1";
    for (int d = 2; d < dl.ndim; ++d) slots += ", " + std::to_string(dl.shape[d]);
    slots += ")";
    // torch would advise .reshape() for pages of [blocks, 2, page, ...], a copy: stores would be
    // lost.
    const bool has_view = dl.shape[0] <= 1 || cache.stride(0) == dl.shape[1] * cache.stride(1);
    cache.value_error(
        str("rows of ", cache.row_bytes, " bytes (shape ", cache.shape_text(), ")"),
        str(rows.row_bytes, " bytes as in ", rows.arg, " (shape ", rows.shape_text(),
            "); of pages of ", dl.shape[1], " slots give ",
            has_view ? str(cache.arg, slots)
                     : str("the tensor that holds all pages as ", slots,
                           ", and count its slots: these pages are apart, and no view of ",
                           cache.arg, " has their slots as rows")));
  }
};

[[noreturn]] void raise_one_is_none(const char* arg, const char* other) {
  raise_type_error(kOp, arg, nullptr,
                   str("a tensor along with ", other, ", or None as both for a single cache"));
}

void store_cpu(const Indices& indices, const StoreParams& p, i64 first_row_bytes, i64 row_bytes,
               int num_copies) {
  if (row_bytes == 0) return;
  indices.check_below(p.num_slots);
  indices.with_index([&](const auto index_at) {
    // K and V take turns, so that each index is read from memory once: row 2 i is K, 2 i + 1 is V.
    // `count` is a constant: as a variable it takes 4 to 9 % more instructions.
    const auto copy_in_turn = [&](const auto count, const StoreParams::Copy* copies, i64 bytes) {
      copy_rows(count * p.num_rows, bytes, [&p, index_at, copies, count](i64 row) {
        const i64 i = row / count;
        const i64 slot = index_at(i);
        const StoreParams::Copy& copy = copies[row % count];
        const bool inside = is_below(slot, p.num_slots);
        return CpuRow{inside ? copy.cache + slot * copy.cache_stride_bytes : nullptr,
                      copy.rows + i * copy.row_stride_bytes};
      });
    };
    const std::integral_constant<i64, 1> one;
    const std::integral_constant<i64, 2> both;
    if (num_copies == 2 && first_row_bytes == row_bytes) {
      return copy_in_turn(both, p.copies, row_bytes);
    }
    copy_in_turn(one, p.copies, first_row_bytes);
    if (num_copies == 2) copy_in_turn(one, p.copies + 1, row_bytes);
  });
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

// `v`: none for a single cache. kSecond, the second half of a call that PyTorch split, leaves
// earlier faults to the next call.
enum class Half { kNone, kSecond };
void store_tables(const Table& k, const std::optional<Table>& v, AnyView indices_arg,
                  Half half = Half::kNone) {
  const Tensor given(kOp, "indices", indices_arg);
  if (given.dl->dtype.code != kDLInt) {
    given.dtype_error("int32 or int64, in the order (k_cache, v_cache, indices, k, v)");
  }
  const Indices indices(given);
  indices.same_device(k.cache);
  if (indices.dl->ndim != 1) indices.shape_error("1 dimension");
  k.check(k.cache, indices);
  if (v) {
    v->cache.same_device(k.cache);
    v->cache.same_dtype(k.cache);
    v->cache.same_num_rows(k.cache);
    v->check(k.cache, indices);
    v->cache.apart_from(k.cache,
                        "memory of its own; for a single cache give None as v_cache and v");
    k.rows.apart_from(v->cache);
    v->rows.apart_from(k.cache);
  }

  // Shorter rows come first; rows of 0 bytes are left out.
  const Table* first = &k;
  const Table* last = v ? &*v : &k;
  if (last->cache.row_bytes < first->cache.row_bytes) std::swap(first, last);
  if (first->cache.row_bytes == 0) first = last;
  const int num_copies = first == last ? 1 : 2;
  const i64 row_bytes = last->cache.row_bytes;
  const i64 first_row_bytes = first->cache.row_bytes;
  StoreParams params{{first->copy(), last->copy()},
                     indices.data,
                     indices.count,
                     k.cache.num_rows,
                     0,
                     kIndicesSite,
                     nullptr};
  if (!k.cache.on_cuda()) {
    return store_cpu(indices, params, first_row_bytes, row_bytes, num_copies);
  }
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes", "first_row_bytes"},
                             row_shape);
  const int vec_bytes = vec_bytes_for(first->cache, first->rows, last->cache, last->rows);
  const Spec spec(row_bytes, vec_bytes, indices.index_bytes, first_row_bytes);
  Device& device = Device::get(k.cache.ordinal());
  if (half != Half::kSecond) check_pending_fault(device);
  const LaunchScope scope(device, current_stream(device.ordinal));
  if (first_row_bytes == row_bytes) {
    return launch_rows(kernels, scope, spec, indices.count, params, num_copies);
  }
  launch_two_sizes(kernels, scope, spec, params);
}

// v_cache and v are None for a single cache.
void store(AnyView k_cache_arg, AnyView v_cache_arg, AnyView indices_arg, AnyView k_arg,
           AnyView v_arg) {
  const Table k("k_cache", k_cache_arg, "k", k_arg);
  std::optional<Table> v;
  if (!is_none(v_cache_arg) || !is_none(v_arg)) {
    if (is_none(v_cache_arg)) raise_one_is_none("v_cache", "v");
    if (is_none(v_arg)) raise_one_is_none("v", "v_cache");
    v.emplace("v_cache", v_cache_arg, "v", v_arg);
  }
  store_tables(k, v, indices_arg);
}

// The second half of a call that PyTorch split; messages name v_cache.
void store_v(AnyView v_cache_arg, AnyView indices_arg, AnyView v_arg) {
  store_tables(Table("v_cache", v_cache_arg, "v", v_arg), std::nullopt, indices_arg, Half::kSecond);
}

JITKERN_EXPORT_OP(store_cache, store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_v_cache_now, store_v);

}  // namespace

}  // namespace jitkern
