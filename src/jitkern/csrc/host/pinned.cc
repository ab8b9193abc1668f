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

// The pool that contains [begin, end), if there is one.
std::optional<Pool> pool_of(u64 begin, u64 end) {
  if (!any_pool.load(std::memory_order_relaxed)) return std::nullopt;
  const std::shared_lock<std::shared_mutex> lock(pools_mutex);
  for (const Pool& pool : pools) {
    if (pool.begin <= begin && begin < pool.end && end <= pool.end) return pool;
  }
  return std::nullopt;
}

std::string range_text(u64 begin, u64 end) {
  char text[64];
  std::snprintf(text, sizeof(text), "[0x%llx, 0x%llx)", begin, end);
  return text;
}

bool is_mapped(const MemoryRange& range) {
  return range.type == kMemoryTypeHost && range.device_address != nullptr;
}

// The end of the pinned memory that begins with `first`, the registration of the rows' first byte.
// Adjacent registrations count if the GPU's addresses are adjacent too.
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
  if (const auto pool = pool_of(rows.begin, rows.end)) {
    if (pool->device_address == nullptr) {
      rows.value_error("memory of a PinnedPool that was closed",
                       "an open pool, or a copy on a GPU");
    }
    return const_cast<char*>(pool->device_address) + (rows.begin - pool->begin);
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
  if (const auto pool = pool_of(at, at + 1)) return pool->device_address != nullptr ? pool->end : 0;
  const MemoryRange range = memory_range(reinterpret_cast<const void*>(at));
  return is_mapped(range) ? address(range.begin) + static_cast<u64>(range.bytes) : 0;
}

bool is_mapped(const Rows& rows) {
  if (pool_of(rows.begin, rows.end)) return true;  // also if it was closed
  const MemoryRange first = memory_range(rows.data);
  return is_mapped(first) && mapped_end(rows, first) >= rows.end;
}

}  // namespace jitkern
