// Host memory that a GPU accesses in place.
#pragma once

#include <jitkern/check.h>

namespace jitkern {

// The GPU's address of `rows` in memory that was allocated as pinned, or registered in one or
// several adjacent pieces. ValueError with the cure if not all rows are pinned. The device's
// context is current.
constexpr const char* kPinCure =
    "pinned host memory for a copy with a GPU; allocate it with torch.empty(..., pin_memory=True) "
    "or call .pin_memory()";
char* mapped_rows(const Rows& rows, const char* cure = kPinCure);
// Whether all rows are in pinned memory.
bool is_mapped(const Rows& rows);

// The end of the registration of the byte at this address, beyond which one copy of the engine may
// not go; 0 if the byte is not pinned. The device's context is current.
u64 registration_end(u64 at);

// Pools of pinned memory, for whose rows the driver is not called. Tensors may keep the memory of a
// closed pool; mapped_rows refuses their rows.
void add_pool(const char* begin, i64 num_bytes, const char* device_address);
void close_pool(const char* begin);
void forget_pool(u64 begin);
// How many were closed so far: addresses that were looked up before may be gone.
u64 num_pools_closed();

}  // namespace jitkern
