// Rows of host memory that a GPU reads or writes in place.
#pragma once

#include <jitkern/check.h>

#include <vector>

namespace jitkern {

// The address at which the GPU finds `rows`, which lie in pinned memory: allocated as such or
// registered, also in several pieces that follow each other. ValueError with the cure where not all
// of them do. The device's context is current.
constexpr const char* kPinCure =
    "pinned host memory for a copy with a GPU; allocate it with torch.empty(..., pin_memory=True) "
    "or call .pin_memory()";
char* mapped_rows(const Rows& rows, const char* cure = kPinCure);
// Whether all of them lie in pinned memory.
bool is_mapped(const Rows& rows);

// Where the registration ends that this byte lies in, which no copy of the engine may leave; 0
// where the byte is not pinned. The device's context is current.
u64 registration_end(u64 at);

// Pools that are registered as a whole, piece by piece in the order of `pieces`: of their rows the
// driver is not asked. Of one that was closed mapped_rows says so, as long as tensors keep its
// memory.
void add_pool(const char* begin, i64 num_bytes, const char* device_address,
              const std::vector<char*>& pieces);
void close_pool(const char* begin);
void forget_pool(u64 begin);
void forget_all_pools();  // in a forked child

}  // namespace jitkern
