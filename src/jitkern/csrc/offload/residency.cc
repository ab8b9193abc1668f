// ResidencyMap on the host: its state, the checks of a call, the CPU implementation, the launch.
#include <jitkern/launch.h>
#include <tvm/ffi/object.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "ops/block_buffers.h"
#include "residency.h"

namespace jitkern {

namespace {

using tvm::ffi::ObjectRef;

constexpr const char* kSwapIn = "ResidencyMap.swap_in";
constexpr const char* kResolve = "ResidencyMap.resolve";
constexpr i64 kMostHostRows = std::numeric_limits<i32>::max();  // of a table by pages
constexpr const char* kOutcome = "the list was not served";

[[noreturn]] void raise_too_long(const char* op, const char* arg, i64 list, i64 missed, i64 bound,
                                 const char* note) {
  raise_error("IndexError",
              str(op, ": ", arg, ": list ", list, " misses ", missed,
                  " rows, expected at most the ", bound - 1, " slots that it does not use", note));
}

[[noreturn]] void raise_twice(const char* op, const char* arg, i64 list, i64 state, i64 other,
                              const char* note) {
  raise_error("IndexError", str(op, ": ", arg, ": state ", state, " at positions ", list, " and ",
                                other, ", expected each state once", note));
}

struct Sites {
  FaultSite rows, length, states, twice, pages;

  explicit Sites(const char* op)
      : rows(fault_site(op, "rows", raise_index_error, kOutcome)),
        length(fault_site(op, "rows", raise_too_long, kOutcome)),
        states(fault_site(op, "states", raise_index_error, kOutcome)),
        twice(fault_site(op, "states", raise_twice, kOutcome)),
        pages(fault_site(op, "pages", raise_index_error, kOutcome)) {}
};
const Sites kSwapInSites(kSwapIn), kResolveSites(kResolve);

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

// -- arguments -----------------------------------------------------------------------------------

// Rows of a tensor, or blocks of a list.
struct RowsSide {
  const char* op;
  const char* arg;
  std::optional<Rows> rows;
  BlockBuffers* list;

  RowsSide(const char* op, const char* arg, AnyView value)
      : op(op), arg(arg), list(BlockBuffers::of(value)) {
    if (list == nullptr) {
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
Rows whole(const Indices& items) {
  const i64 bytes = items.count * items.index_bytes;
  return Rows(items, 1, bytes, bytes);
}

struct ResidencyCall {
  const char* op;
  const Sites& sites;
  const Residency& map;
  Indices rows, slots_out;
  std::optional<Indices> states, pages, plan_pairs, plan_counts;
  CountArg count;
  i64 num_lists;
  i64 length;

  ResidencyCall(const char* op, const Sites& sites, const Residency& map, AnyView rows_arg,
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
    if (!is_below(page, num_pages)) raise_index_error(op, "pages", place, page, num_pages);
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
struct Fetch {
  RowsSide host, cache;
  i64 row_bytes = 0;      // of all buffers
  i64 max_row_bytes = 0;  // of one

  Fetch(const ResidencyCall& call, AnyView host_arg, AnyView cache_arg)
      : host(kSwapIn, "host", host_arg), cache(kSwapIn, "cache", cache_arg) {
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
    if (!call.pages && host.num_rows() < map.state.num_rows) {
      host.value_error(str(host.num_rows(), " rows"),
                       str("at least the ", map.state.num_rows, " of the map"));
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
    if (cache.list) cache.list->require_no_overlap(kSwapIn, "cache");
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

// -- on the CPU ----------------------------------------------------------------------------------

// What a list finds: as in residency.cu.
struct Found {
  i64 state = -1;
  std::vector<i64> slots;  // of each position
  struct Miss {
    i64 row, host_row, slot;
  };
  std::vector<Miss> misses;
  std::vector<i32> order;
  i64 num_asked = 0;
};

template <class RowAt>
Found find_rows(const ResidencyCall& call, const RowAt& row_at, i64 list, i64 state,
                i64 num_host_rows) {
  const ResidencyState& s = call.map.state;
  Found found;
  found.state = state;
  found.slots.assign(static_cast<size_t>(call.length), -1);
  if (state < 0) return found;
  std::vector<bool> used(static_cast<size_t>(s.num_slots));
  std::vector<i64> missed;
  std::unordered_map<i64, i64> miss_of;  // of the missing rows
  for (i64 at = 0; at < call.length; ++at) {
    const i64 row = row_at(list * call.length + at);
    if (row < 0) continue;
    if (row >= s.num_rows) {
      raise_index_error(call.op, "rows", list * call.length + at, row, s.num_rows);
    }
    ++found.num_asked;
    const i32 slot = s.slot_of_row[state * s.num_rows + row];
    if (is_below(slot, s.num_slots)) {
      used[slot] = true;
      found.slots[at] = state * s.num_slots + slot;
    } else if (miss_of.emplace(row, missed.size()).second) {
      missed.push_back(row);
    }
  }
  std::vector<i32> stale, hits;
  for (i64 i = 0; i < s.num_evictable; ++i) {
    const i32 slot = s.order[state * s.num_evictable + i];
    (is_below(slot, s.num_slots) && !used[slot] ? stale : hits).push_back(slot);
  }
  const i64 num_stale = static_cast<i64>(stale.size());
  const i64 num_missed = static_cast<i64>(missed.size());
  if (num_missed > num_stale) {
    raise_too_long(call.op, "rows", list, num_missed, num_stale + 1, "; nothing was written");
  }
  for (i64 at = 0; at < call.length; ++at) {
    const auto miss = miss_of.find(row_at(list * call.length + at));
    if (miss != miss_of.end()) found.slots[at] = state * s.num_slots + stale[miss->second];
  }
  for (i64 i = 0; i < num_missed; ++i) {
    found.misses.push_back({missed[i], call.host_row(state, missed[i], num_host_rows), stale[i]});
  }
  found.order.assign(stale.begin() + num_missed, stale.end());
  found.order.insert(found.order.end(), stale.begin(), stale.begin() + num_missed);
  found.order.insert(found.order.end(), hits.begin(), hits.end());
  return found;
}

void set_item(const Indices& items, i64 i, i64 value) {
  auto* const data = const_cast<void*>(items.data);
  if (items.index_bytes == 4) {
    static_cast<i32*>(data)[i] = static_cast<i32>(value);
  } else {
    static_cast<i64*>(data)[i] = value;
  }
}

void commit(const ResidencyCall& call, const Fetch* fetch, i64 list, const Found& found) {
  const ResidencyState& s = call.map.state;
  const i64 first_row = found.state * s.num_slots;
  for (i64 at = 0; at < call.length; ++at) {
    set_item(call.slots_out, list * call.length + at, found.slots[at]);
  }
  const i64 num_missed = static_cast<i64>(found.misses.size());
  if (call.plan_pairs) {
    for (i64 i = 0; i < call.length; ++i) {
      const i64 place = 2 * (list * call.length + i);
      set_item(*call.plan_pairs, place, i < num_missed ? found.misses[i].host_row : -1);
      set_item(*call.plan_pairs, place + 1, i < num_missed ? first_row + found.misses[i].slot : -1);
    }
    set_item(*call.plan_counts, list, num_missed);
  }
  if (found.state < 0) return;
  for (const auto& [row, host_row, slot] : found.misses) {
    i32& row_of_slot = s.row_of_slot[first_row + slot];
    i32* const slot_of_row = s.slot_of_row + found.state * s.num_rows;
    if (is_below(row_of_slot, s.num_rows)) slot_of_row[row_of_slot] = -1;
    slot_of_row[row] = static_cast<i32>(slot);
    row_of_slot = static_cast<i32>(row);
    for (i64 layer = 0; fetch != nullptr && layer < fetch->cache.num_layers(); ++layer) {
      std::memcpy(fetch->cache.row(layer, first_row + slot), fetch->host.row(layer, host_row),
                  static_cast<size_t>(fetch->cache.entry(layer).piece_bytes));
    }
  }
  std::copy(found.order.begin(), found.order.end(), s.order + found.state * s.num_evictable);
  const i64 more[] = {found.num_asked - num_missed, num_missed,
                      fetch != nullptr ? num_missed * fetch->row_bytes : 0};
  for (int i = 0; i < 3; ++i) s.host_counts[3 * found.state + i] += more[i];
}

void run_by_cpu(const ResidencyCall& call, const Fetch* fetch) {
  const i64 num_states = call.map.state.num_states;
  const i64 num_used = call.count.read(call.num_lists);
  std::vector<i64> states(static_cast<size_t>(call.num_lists), -1);
  std::unordered_map<i64, i64> list_of;
  for (i64 list = 0; list < num_used; ++list) {
    states[list] = list;
    if (call.states) call.states->with_index([&](const auto at) { states[list] = at(list); });
    if (states[list] < 0) continue;
    if (states[list] >= num_states) {
      raise_index_error(call.op, "states", list, states[list], num_states);
    }
    const auto [other, is_first] = list_of.emplace(states[list], list);
    if (!is_first) {
      raise_twice(call.op, "states", list, states[list], other->second, "; nothing was written");
    }
  }
  const i64 num_host_rows = fetch != nullptr ? fetch->host.num_rows() : kMostHostRows;
  std::vector<Found> all;
  call.rows.with_index([&](const auto row_at) {
    for (i64 list = 0; list < call.num_lists; ++list) {
      all.push_back(find_rows(call, row_at, list, states[list], num_host_rows));
    }
  });
  for (i64 list = 0; list < call.num_lists; ++list) commit(call, fetch, list, all[list]);
}

// -- on a GPU ------------------------------------------------------------------------------------

constexpr i64 kDefaultSharedBytes = 48 << 10;
constexpr i64 kMostRowBytes = 1 << 30;
constexpr i64 kMostLists = 65535;  // blocks of a grid in its second dimension

void run_by_gpu(const ResidencyCall& call, const Fetch* fetch) {
  static KernelTable kernels("residency", {"vec_bytes", "index_bytes"},
                             [](const Spec&, int, int) { return GroupShape{1, 1, 1, 1}; });
  if (call.num_lists > kMostLists) {
    call.rows.shape_error(str("at most ", kMostLists, " lists"));
  }
  const LaunchScope scope(call.rows);
  const Device& device = scope.device;
  ResidencyParams p{};
  p.state = call.map.state;
  int vec_bytes = 16;
  if (fetch != nullptr) {
    vec_bytes = widest_vec(fetch->host.bits() | fetch->cache.bits());
    p.host = fetch->host.params(scope);
    p.cache = fetch->cache.params(scope);
    p.num_layers = fetch->row_bytes > 0 ? static_cast<u32>(fetch->cache.num_layers()) : 0;
    p.row_bytes = fetch->row_bytes;
  }
  const LoadedKernels& loaded = kernels.find(device, Spec(vec_bytes, call.rows.index_bytes));
  const Kernel& kernel = loaded.entries[0];
  p.segments = Divisor::of(1);
  if (fetch != nullptr) {
    const i64 max_lead = kHostLineBytes - vec_bytes;
    const i64 segments = segments_of(fetch->max_row_bytes, max_lead, vec_bytes);
    p.segments = Divisor::of(static_cast<u32>(segments));
    if (fetch->max_row_bytes >= kMostRowBytes ||
        call.length * p.num_layers * segments >= i64(1) << 31) {
      call.rows.value_error(str("lists of ", call.length, " rows of ", p.num_layers, " buffers of ",
                                fetch->max_row_bytes, " bytes"),
                            "less in one call");
    }
  }
  p.rows = call.rows.data;
  p.slots_out = const_cast<void*>(call.slots_out.data);
  if (call.plan_pairs) {
    p.plan_pairs = const_cast<void*>(call.plan_pairs->data);
    p.plan_counts = static_cast<i32*>(const_cast<void*>(call.plan_counts->data));
  }
  if (call.states) {
    p.states = call.states->data;
    p.states_bytes = call.states->index_bytes;
  }
  call.count.give_to(p);
  const i64 num_host_rows = fetch != nullptr ? fetch->host.num_rows() : kMostHostRows;
  p.num_host_pages = std::min(num_host_rows, kMostHostRows) / call.page_rows();
  p.page = Divisor::of(static_cast<u32>(call.page_rows()));
  if (call.pages) {
    p.pages = call.pages->data;
    p.pages_bytes = call.pages->index_bytes;
    p.num_pages = static_cast<i32>(call.pages->dl->shape[1]);
  }
  p.num_lists = static_cast<i32>(call.num_lists);
  p.length = static_cast<i32>(call.length);
  p.table_size = static_cast<u32>(2 * call.length + 2);
  p.rows_site = call.sites.rows;
  p.length_site = call.sites.length;
  p.states_site = call.sites.states;
  p.twice_site = call.sites.twice;
  p.pages_site = call.sites.pages;
  p.fault = device.fault_device;
  const i64 shared = ResidencyShared(nullptr, p.table_size, call.length, call.map.state.num_slots,
                                     call.pages.has_value())
                         .bytes;
  const i64 most = device.max_shared_bytes - kernel.own_shared_bytes;
  if (shared > most) {
    call.rows.value_error(str("lists of ", call.length, " rows and ", call.map.state.num_slots,
                              " slots of a state, ", shared, " bytes of shared memory"),
                          str("at most ", most, " on this GPU"));
  }
  if (shared + kernel.own_shared_bytes > kDefaultSharedBytes) {
    scope.allow_shared_bytes(kernel, most);
  }
  // Clusters of 8 and 4 do not fill the GPU: its SMs are in groups of 16 or 18. 16 lists take 16.1
  // us with clusters of 8, 8.4 with clusters of 4 (H200).
  unsigned blocks = device.arch >= 90 ? kMostBlocksOfCluster : 1;
  const auto fits = [&] {
    return blocks * call.num_lists <= device.num_sms * (blocks > 2 ? 0.75 : 1);
  };
  while (blocks > 1 && !fits()) blocks /= 2;
  scope.launch(kernel, blocks, p, static_cast<int>(p.num_lists), blocks, shared);
}

// -- for Python ----------------------------------------------------------------------------------

const Residency& residency_of(AnyView map) { return *map.as<Residency>(); }

void run(const ResidencyCall& call, const Fetch* fetch) {
  if (call.num_lists == 0) return;  // empty lists have counts
  call.map.on_cuda() ? run_by_gpu(call, fetch) : run_by_cpu(call, fetch);
}

// `plan` is (pairs, counts) or None.
bool swap_in(AnyView map, AnyView host, AnyView cache, AnyView rows, AnyView slots_out,
             AnyView states, AnyView count, AnyView pages, AnyView plan_pairs,
             AnyView plan_counts) {
  const ResidencyCall call(kSwapIn, kSwapInSites, residency_of(map), rows, slots_out, states, count,
                           pages, plan_pairs, plan_counts);
  const Fetch fetch(call, host, cache);
  run(call, &fetch);
  return false;
}

bool resolve(AnyView map, AnyView rows, AnyView slots_out, AnyView states, AnyView count,
             AnyView pages, AnyView plan_pairs, AnyView plan_counts) {
  run(ResidencyCall(kResolve, kResolveSites, residency_of(map), rows, slots_out, states, count,
                    pages, plan_pairs, plan_counts),
      nullptr);
  return false;
}

// All tensors are int32 or int64, contiguous, on the map's device; host_counts is pinned.
ObjectRef make_residency(tvm::ffi::Tensor slot_of_row, tvm::ffi::Tensor row_of_slot,
                         tvm::ffi::Tensor order, tvm::ffi::Tensor next_order,
                         tvm::ffi::Tensor counts, tvm::ffi::Tensor host_counts) {
  auto map = tvm::ffi::make_object<Residency>();
  map->device = row_of_slot.device();
  ResidencyState& s = map->state;
  s.slot_of_row = static_cast<i32*>(slot_of_row.data_ptr());
  s.row_of_slot = static_cast<i32*>(row_of_slot.data_ptr());
  s.order = static_cast<i32*>(order.data_ptr());
  s.next_order = static_cast<i32*>(next_order.data_ptr());
  s.counts = static_cast<i64*>(counts.data_ptr());
  s.host_counts = static_cast<i64*>(host_counts.data_ptr());
  if (map->on_cuda()) {
    const LaunchScope scope(map->device.device_id);
    const Rows rows(Tensor("ResidencyMap", "counts", host_counts));
    s.host_counts = reinterpret_cast<i64*>(address_on_gpu(rows));
  }
  s.num_states = static_cast<i32>(row_of_slot.size(0));
  s.num_slots = static_cast<i32>(row_of_slot.size(1));
  s.num_evictable = static_cast<i32>(order.size(1));
  s.num_rows = static_cast<i32>(slot_of_row.size(1));
  map->slot_of_row = std::move(slot_of_row);
  map->row_of_slot = std::move(row_of_slot);
  map->order = std::move(order);
  map->next_order = std::move(next_order);
  map->counts = std::move(counts);
  map->host_counts = std::move(host_counts);
  return ObjectRef(map);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_residency, make_residency);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swap_in, swap_in);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolve, resolve);

}  // namespace jitkern
