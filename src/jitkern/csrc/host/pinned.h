// Rows of host memory that a GPU reads or writes in place.
#pragma once

#include <jitkern/check.h>

namespace jitkern {

// The GPU's address of `rows` in pinned memory, which was allocated so or registered, also in
// several adjacent pieces. ValueError with the cure if not all rows are pinned. The device's
// context is current.
constexpr const char* kPinCure =
    "pinned host memory for a copy with a GPU; allocate it with torch.empty(..., pin_memory=True) "
    "or call .pin_memory()";
char* mapped_rows(const Rows& rows, const char* cure = kPinCure);
// Whether all rows lie in pinned memory.
bool is_mapped(const Rows& rows);

// The end of the registration that this byte lies in, which no copy of the engine may leave; 0 if
// the byte is not pinned. The device's context is current.
u64 registration_end(u64 at);

// Pools of pinned memory; the driver is not asked about their rows. mapped_rows refuses rows of a
// closed pool, while tensors keep its memory.
void add_pool(const char* begin, i64 num_bytes, const char* device_address);
void close_pool(const char* begin);
void forget_pool(u64 begin);
// How many were closed so far: addresses that were looked up before may be gone.
u64 num_pools_closed();

}  // namespace jitkern
