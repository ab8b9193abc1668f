// A call of ResidencyMap.swap_in or resolve: its map and its arguments, checked.
#pragma once

#include <jitkern/launch.h>
#include <tvm/ffi/object.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/block_buffers.h"
#include "residency.h"

namespace jitkern {

constexpr i64 kMostHostRows = std::numeric_limits<i32>::max();  // host rows that `pages` can name
constexpr const char* kOutcome = "the list was not served";

[[noreturn]] inline void raise_too_long(const char* op, const char* arg, i64 list, i64 missed,
                                        i64 bound, const char* note) {
  raise_error("IndexError",
              str(op, ": ", arg, ": list ", list, " misses ", missed,
                  " rows, expected at most the ", bound - 1, " slots that it does not use", note));
}

[[noreturn]] inline void raise_twice(const char* op, const char* arg, i64 list, i64 state,
                                     i64 other, const char* note) {
  raise_error("IndexError", str(op, ": ", arg, ": state ", state, " at positions ", list, " and ",
                                other, ", expected each state once", note));
}

[[noreturn]] inline void raise_no_page(const char* op, const char* arg, i64 place, i64 page,
                                       i64 bound, const char* note) {
  raise_error("IndexError", str(op, ": ", arg, ": page ", page, " at position ", place,
                                ", of which a row is asked for, expected one of the host's ", bound,
                                " pages", note));
}

struct ResidencySites {
  FaultSite rows, length, states, twice, pages;

  explicit ResidencySites(const char* op)
      : rows(fault_site(op, "rows", raise_index_error, kOutcome)),
        length(fault_site(op, "rows", raise_too_long, kOutcome)),
        states(fault_site(op, "states", raise_index_error, kOutcome)),
        twice(fault_site(op, "states", raise_twice, kOutcome)),
        pages(fault_site(op, "pages", raise_no_page, kOutcome)) {}
};

// The tensors of a map, which Python has made.
class Residency : public tvm::ffi::Object {
 public:
  tvm::ffi::Tensor slot_of_row, row_of_slot, order, next_order, counts, host_counts;
  ResidencyState state{};
  DLDevice device{};

  // Kernels that are queued may still write the counts: 24 bytes for each state are not freed.
  ~Residency() {
    if (on_cuda()) new tvm::ffi::Tensor(host_counts);
  }

  i64 num_cache_rows() const { return i64(state.num_states) * state.num_slots; }
  bool on_cuda() const { return device.device_type == kDLCUDA; }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.Residency", Residency, tvm::ffi::Object);
};

// Rows of a tensor, or blocks of a list.
struct RowsSide {
  const char* op;
  const char* arg;
  std::optional<Rows> rows;
  BlockBuffers* list;

  RowsSide(const char* op, const char* arg, AnyView value)
      : op(op), arg(arg), list(BlockBuffers::of(value)) {
    if (list == nullptr) {
      if (value.as<tvm::ffi::Array<tvm::ffi::Any>>()) {
        raise_type_error(op, arg, value, "a tensor, or BlockBuffers(list) for a list of tensors");
      }
      rows.emplace(op, arg, value);
    } else if (list->num_rows() != 1) {
      raise_value_error(op, arg, "blocks of several pieces", "contiguous blocks");
    }
  }

  bool on_cuda() const { return list ? list->on_cuda() : rows->on_cuda(); }
  int ordinal() const {
    return on_cuda() ? (list ? list->device().device_id : rows->ordinal()) : -1;
  }
  i64 num_layers() const { return list ? static_cast<i64>(list->entries().size()) : 1; }
  i64 num_rows() const { return list ? list->num_blocks() : rows->num_rows; }
  BufferEntry entry(i64 layer) const {
    if (list) return list->entries()[layer];
    return {address(rows->data), rows->stride_bytes, 0, rows->row_bytes};
  }
  u64 bits() const {
    return list ? list->bits()
                : address(rows->data) | static_cast<u64>(rows->stride_bytes | rows->row_bytes);
  }
  char* row(i64 layer, i64 row) const {
    const BufferEntry at = entry(layer);
    const i64 parts = list ? list->num_parts() : 1;
    return reinterpret_cast<char*>(at.address) + row / parts * at.block_bytes +
           row % parts * at.part_bytes;
  }
  [[noreturn]] void value_error(const std::string& actual, const std::string& expected) const {
    raise_value_error(op, arg, actual, expected);
  }

  BlockSide params(const LaunchScope& scope) const {
    BlockSide side{};
    side.first = entry(0);
    if (list) side.table = list->table(scope, op, arg);
    if (!list) side.first.address = address(address_on_gpu(*rows));
    side.num_blocks = num_rows();
    side.num_parts = static_cast<u32>(list ? list->num_parts() : 1);
    return side;
  }
};

// A contiguous tensor as one row, for checks of overlap.
inline Rows whole(const Indices& items) {
  const i64 bytes = items.count * items.index_bytes;
  return Rows(items, 1, bytes, bytes);
}

struct ResidencyCall {
  const char* op;
  const ResidencySites& sites;
  const Residency& map;
  Indices rows, slots_out;
  std::optional<Indices> states, pages, plan_pairs, plan_counts;
  CountArg count;
  i64 num_lists;
  i64 length;

  ResidencyCall(const char* op, const ResidencySites& sites, const Residency& map, AnyView rows_arg,
                AnyView slots_arg, AnyView states_arg, AnyView count_arg, AnyView pages_arg,
                AnyView pairs_arg, AnyView counts_arg)
      : op(op),
        sites(sites),
        map(map),
        rows(op, "rows", rows_arg),
        slots_out(op, "slots_out", slots_arg),
        count(op, count_arg, rows) {
    const DLTensor& dl = *rows.dl;
    if (dl.ndim < 2) rows.shape_error("[num_lists, length]");
    num_lists = dl.shape[0];
    length = num_lists == 0 ? 0 : rows.count / num_lists;
    if (rows.on_cuda() != map.on_cuda() ||
        (map.on_cuda() && rows.ordinal() != map.device.device_id)) {
      rows.value_error(
          "device " + rows.device_name(),
          map.on_cuda() ? str("cuda:", map.device.device_id, ", as the map") : "cpu, as the map");
    }
    if (length > kMostListLength) {
      rows.shape_error(str("lists of at most ", kMostListLength, " rows"));
    }
    same_shape(slots_out);
    if (!is_none(states_arg)) {
      states.emplace(op, "states", states_arg);
      states->same_device(rows);
      if (states->count != num_lists) states->shape_error(str("[", num_lists, "], as rows"));
    } else if (num_lists > map.state.num_states) {
      rows.shape_error(str("at most ", map.state.num_states, " lists, one for each state"));
    }
    if (!is_none(pages_arg)) take_pages(pages_arg);
    if (!is_none(pairs_arg)) {
      plan_pairs.emplace(op, "plan.pairs", pairs_arg);
      plan_counts.emplace(op, "plan.counts", counts_arg);
      plan_pairs->same_dtype(rows);
      plan_pairs->same_device(rows);
      plan_counts->same_device(rows);
      const DLTensor& pairs = *plan_pairs->dl;
      if (pairs.ndim != dl.ndim + 1 || !std::equal(dl.shape, dl.shape + dl.ndim, pairs.shape) ||
          pairs.shape[dl.ndim] != 2) {
        std::vector<int64_t> expected(dl.shape, dl.shape + dl.ndim);
        expected.push_back(2);
        plan_pairs->shape_error(jitkern::shape_text(expected.data(), expected.size()) +
                                ", as rows");
      }
      if (plan_counts->dl->ndim != 1 || plan_counts->count != num_lists ||
          plan_counts->index_bytes != 4) {
        plan_counts->shape_error(str("[", num_lists, "], int32"));
      }
    }
    if (rows.index_bytes == 4 && map.num_cache_rows() > kMostHostRows) {
      rows.dtype_error(str("int64, as the cache has ", map.num_cache_rows(), " rows"));
    }
    require_apart();
  }

  // Each tensor that is written has memory of its own.
  void require_apart() const {
    const Indices* const written[] = {&slots_out, plan_pairs ? &*plan_pairs : nullptr,
                                      plan_counts ? &*plan_counts : nullptr};
    for (const Indices* const output : written) {
      if (output == nullptr) continue;
      const Rows memory = whole(*output);
      rows.apart_from(memory);
      if (states) states->apart_from(memory);
      if (pages) pages->apart_from(memory);
      count.apart_from(memory);
      for (const Indices* const other : written) {
        if (other != nullptr && other != output) other->apart_from(memory);
      }
    }
  }

  // [num_states, num_pages], of as many rows each.
  void take_pages(AnyView value) {
    pages.emplace(op, "pages", value);
    pages->same_device(rows);
    const DLTensor& dl = *pages->dl;
    const i64 num_rows = map.state.num_rows;
    if (dl.ndim != 2 || dl.shape[0] != map.state.num_states || dl.shape[1] < 1 ||
        num_rows % dl.shape[1] != 0) {
      pages->shape_error(str("[", map.state.num_states,
                             ", num_pages], where num_pages divides the ", num_rows,
                             " rows of a state"));
    }
  }
  i64 page_rows() const { return pages ? map.state.num_rows / pages->dl->shape[1] : 1; }

  // The row of the host that is a row of a state. IndexError if its page is none. On the CPU.
  i64 host_row(i64 state, i64 row, i64 num_host_rows) const {
    if (!pages) return row;
    const i64 place = state * pages->dl->shape[1] + row / page_rows();
    i64 page = 0;
    pages->with_index([&](const auto at) { page = at(place); });
    const i64 num_pages = std::min(num_host_rows, kMostHostRows) / page_rows();
    if (!is_below(page, num_pages)) {
      raise_no_page(op, "pages", place, page, num_pages, "; nothing was written");
    }
    return page * page_rows() + row % page_rows();
  }

  void same_shape(const Indices& other) const {
    other.same_dtype(rows);
    other.same_device(rows);
    if (other.dl->ndim != rows.dl->ndim ||
        !std::equal(rows.dl->shape, rows.dl->shape + rows.dl->ndim, other.dl->shape)) {
      other.shape_error(rows.shape_text() + ", as rows");
    }
  }
};

// Where the rows are, and where they go.
struct FetchArgs {
  RowsSide host, cache;
  i64 row_bytes = 0;      // a row's in all buffers
  i64 max_row_bytes = 0;  // a row's in one buffer, at most

  FetchArgs(const ResidencyCall& call, AnyView host_arg, AnyView cache_arg)
      : host(call.op, "host", host_arg), cache(call.op, "cache", cache_arg) {
    const Residency& map = call.map;
    const int ordinal = map.on_cuda() ? map.device.device_id : -1;
    if (cache.ordinal() != ordinal) {
      cache.value_error(cache.on_cuda() ? str("device cuda:", cache.ordinal()) : "device cpu",
                        ordinal < 0 ? "cpu, as the map" : str("cuda:", ordinal, ", as the map"));
    }
    if (host.on_cuda()) host.value_error(str("device cuda:", host.ordinal()), "host memory");
    if (cache.num_rows() != map.num_cache_rows()) {
      cache.value_error(str(cache.num_rows(), " rows"),
                        str(map.num_cache_rows(), ", the slots of all states"));
    }
    if (!call.pages && host.num_rows() != map.state.num_rows) {
      host.value_error(str(host.num_rows(), " rows"),
                       str("the ", map.state.num_rows, " of the map, or pages="));
    }
    if (host.num_layers() != cache.num_layers()) {
      host.value_error(str(host.num_layers(), " buffers"), str(cache.num_layers(), " as in cache"));
    }
    for (i64 layer = 0; layer < cache.num_layers(); ++layer) {
      const i64 bytes = cache.entry(layer).piece_bytes;
      if (host.entry(layer).piece_bytes != bytes) {
        host.value_error(str("rows of ", host.entry(layer).piece_bytes, " bytes"),
                         str(bytes, " as in cache"));
      }
      row_bytes += bytes;
      max_row_bytes = std::max(max_row_bytes, bytes);
    }
    if (cache.rows) cache.rows->distinct_rows();
    if (cache.list) cache.list->require_no_overlap(call.op, "cache");
    if (cache.rows) {
      call.rows.apart_from(*cache.rows);
      call.slots_out.apart_from(*cache.rows);
    }
    if (cache.rows && host.rows) {
      cache.rows->same_dtype(*host.rows);
      cache.rows->apart_from(*host.rows);
    }
  }
};

}  // namespace jitkern
