// Rows of host memory that a GPU reads or writes in place.
#include "host/pinned.h"

#include <jitkern/launch.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace jitkern {

namespace {

struct Pool {
  u64 begin;
  u64 end;
  const char* device_address;  // null: closed
};

std::shared_mutex pools_mutex;
std::atomic<bool> any_pool{false};
std::atomic<u64> num_closed{0};
auto& pools = *new std::vector<Pool>();  // tensors may outlive static objects

// Calls `use` with the pool that the address lies in. False if there is none.
template <class Use>
bool find_pool(u64 at, const Use& use) {
  if (!any_pool.load(std::memory_order_relaxed)) return false;
  const std::shared_lock<std::shared_mutex> lock(pools_mutex);
  for (const Pool& pool : pools) {
    if (pool.begin <= at && at < pool.end) return use(pool), true;
  }
  return false;
}

// The pool that all of the rows lie in, if there is one.
struct Address {
  u64 pool_begin = 0;
  const char* device_address = nullptr;
};
std::optional<Address> pool_of(const Rows& rows) {
  std::optional<Address> found;
  find_pool(rows.begin, [&](const Pool& pool) {
    if (rows.end <= pool.end) found = {pool.begin, pool.device_address};
  });
  return found;
}

std::string range_text(u64 begin, u64 end) {
  char text[64];
  std::snprintf(text, sizeof(text), "[0x%llx, 0x%llx)", begin, end);
  return text;
}

bool is_mapped(const MemoryRange& range) {
  return range.type == kMemoryTypeHost && range.device_address != nullptr;
}

// Where the pinned memory ends that begins with `first`, the registration of the rows' first byte.
// Registrations may follow each other, if the GPU's addresses do too.
u64 mapped_end(const Rows& rows, const MemoryRange& first) {
  u64 end = address(first.begin) + static_cast<u64>(first.bytes);
  while (end < rows.end) {
    const MemoryRange next = memory_range(reinterpret_cast<const void*>(end));
    const u64 wanted = address(first.device_address) + (end - address(rows.data));
    if (!is_mapped(next) || address(next.device_address) != wanted) break;
    end = address(next.begin) + static_cast<u64>(next.bytes);
  }
  return end;
}

}  // namespace

void add_pool(const char* begin, i64 num_bytes, const char* device_address) {
  const std::lock_guard<std::shared_mutex> lock(pools_mutex);
  pools.push_back({address(begin), address(begin) + static_cast<u64>(num_bytes), device_address});
  any_pool = true;
}

u64 num_pools_closed() { return num_closed; }

void close_pool(const char* begin) {
  ++num_closed;
  const std::lock_guard<std::shared_mutex> lock(pools_mutex);
  for (Pool& pool : pools) {
    if (pool.begin == address(begin)) pool.device_address = nullptr;
  }
}

void forget_pool(u64 begin) {
  const std::lock_guard<std::shared_mutex> lock(pools_mutex);
  const auto found = std::find_if(pools.begin(), pools.end(),
                                  [begin](const Pool& pool) { return pool.begin == begin; });
  if (found != pools.end()) pools.erase(found);
}

char* mapped_rows(const Rows& rows, const char* cure) {
  if (const auto pool = pool_of(rows)) {
    if (pool->device_address == nullptr) {
      rows.value_error("memory of a PinnedPool that was closed",
                       "an open pool, or a copy on a GPU");
    }
    return const_cast<char*>(pool->device_address) + (address(rows.data) - pool->pool_begin);
  }
  const MemoryRange first = memory_range(rows.data);
  if (!is_mapped(first)) {
    rows.value_error("pageable host memory", cure);
  }
  if (const u64 end = mapped_end(rows, first); end < rows.end) {
    rows.value_error("rows at " + range_text(rows.begin, rows.end) + ", of which " +
                         range_text(rows.begin, end) + " is pinned",
                     "pinned host memory for all of them");
  }
  return const_cast<char*>(first.device_address);
}

u64 registration_end(u64 at) {
  u64 end = 0;
  const bool is_pool = find_pool(at, [&](const Pool& pool) {
    if (pool.device_address != nullptr) end = pool.end;
  });
  if (is_pool) return end;
  const MemoryRange range = memory_range(reinterpret_cast<const void*>(at));
  return is_mapped(range) ? address(range.begin) + static_cast<u64>(range.bytes) : 0;
}

bool is_mapped(const Rows& rows) {
  if (pool_of(rows)) return true;  // or was closed
  const MemoryRange first = memory_range(rows.data);
  return is_mapped(first) && mapped_end(rows, first) >= rows.end;
}

}  // namespace jitkern
