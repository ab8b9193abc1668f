// Rows of host memory that a GPU reads or writes in place.
#include "host/pinned.h"

#include <jitkern/launch.h>

#include <cstdio>

namespace jitkern {

namespace {

std::string range_text(u64 begin, u64 end) {
  char text[64];
  std::snprintf(text, sizeof(text), "[0x%llx, 0x%llx)", begin, end);
  return text;
}

bool is_mapped(const MemoryRange& range) {
  return range.type == kMemoryTypeHost && range.device_address != nullptr;
}

}  // namespace

char* mapped_rows(const Rows& rows) {
  const MemoryRange first = memory_range(rows.data);
  if (!is_mapped(first)) {
    rows.value_error("pageable host memory",
                     "pinned host memory for a copy with a GPU; allocate it with "
                     "torch.empty(..., pin_memory=True) or call .pin_memory()");
  }
  // Large pools are registered piece by piece. The GPU's addresses have to follow each other, too.
  u64 end = address(first.begin) + static_cast<u64>(first.bytes);
  while (end < rows.end) {
    const MemoryRange next = memory_range(reinterpret_cast<const void*>(end));
    const u64 wanted = address(first.device_address) + (end - address(rows.data));
    if (!is_mapped(next) || address(next.device_address) != wanted) {
      rows.value_error("rows at " + range_text(rows.begin, rows.end) + ", of which " +
                           range_text(rows.begin, end) + " is pinned",
                       "pinned host memory for all of them");
    }
    end = address(next.begin) + static_cast<u64>(next.bytes);
  }
  return const_cast<char*>(first.device_address);
}

}  // namespace jitkern
