// ResidencyMap on the host: the CPU implementation, the launch, the functions for Python.
#include <jitkern/launch.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "residency_host.h"

namespace jitkern {

namespace {

using tvm::ffi::ObjectRef;

constexpr const char* kSwapIn = "ResidencyMap.swap_in";
constexpr const char* kResolve = "ResidencyMap.resolve";
const ResidencySites kSwapInSites(kSwapIn), kResolveSites(kResolve);

// -- on the CPU ----------------------------------------------------------------------------------

// What a list finds: as in residency.cu.
struct Found {
  i64 state = -1;
  std::vector<i64> slots;  // one for each position
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
  std::unordered_map<i64, i64> miss_of;  // missing row to its number
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

void commit(const ResidencyCall& call, const FetchArgs* fetch, i64 list, const Found& found) {
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

void run_by_cpu(const ResidencyCall& call, const FetchArgs* fetch) {
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

void run_by_gpu(const ResidencyCall& call, const FetchArgs* fetch) {
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
  // us with clusters of 8, 8.4 with clusters of 4. Nor do clusters of 2 pay there: with 64 lists a
  // decode step beside which they fetch takes 6.27 ms, with single blocks 5.98 (H200).
  unsigned blocks = device.arch >= 90 ? kMostBlocksOfCluster : 1;
  while (blocks > 1 && blocks * call.num_lists > 0.75 * device.num_sms) blocks /= 2;
  scope.launch(kernel, blocks, p, static_cast<int>(p.num_lists), blocks, shared);
}

// -- for Python ----------------------------------------------------------------------------------

const Residency& residency_of(AnyView map) { return *map.as<Residency>(); }

void run(const ResidencyCall& call, const FetchArgs* fetch) {
  if (call.num_lists == 0) return;  // empty lists have counts
  call.map.on_cuda() ? run_by_gpu(call, fetch) : run_by_cpu(call, fetch);
}

// `plan` is (pairs, counts) or None.
bool swap_in(AnyView map, AnyView host, AnyView cache, AnyView rows, AnyView slots_out,
             AnyView states, AnyView count, AnyView pages, AnyView plan_pairs,
             AnyView plan_counts) {
  const ResidencyCall call(kSwapIn, kSwapInSites, residency_of(map), rows, slots_out, states, count,
                           pages, plan_pairs, plan_counts);
  const FetchArgs fetch(call, host, cache);
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
