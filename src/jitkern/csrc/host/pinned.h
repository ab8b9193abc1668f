// Rows of host memory that a GPU reads or writes in place.
#pragma once

#include <jitkern/check.h>

namespace jitkern {

// The address at which the GPU finds `rows`, which lie in pinned memory: allocated as such or
// registered, also in several pieces that follow each other. ValueError with the cure where not all
// of them do. The device's context is current.
char* mapped_rows(const Rows& rows);
// Whether all of them lie in pinned memory.
bool is_mapped(const Rows& rows);

// Pools that are registered as a whole: of their rows the driver is not asked. Of one that was
// closed mapped_rows says so, as long as tensors keep its memory.
void add_pool(const char* begin, i64 num_bytes, const char* device_address);
void close_pool(const char* begin);
void forget_pool(u64 begin);
void forget_all_pools();  // in a forked child

}  // namespace jitkern
