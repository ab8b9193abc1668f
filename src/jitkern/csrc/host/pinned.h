// Rows of host memory that a GPU reads or writes in place.
#pragma once

#include <jitkern/check.h>

namespace jitkern {

// The address at which the GPU finds `rows`, which lie in pinned memory: allocated as such or
// registered, also in several pieces that follow each other. ValueError with the cure where not all
// of them do. The device's context is current.
char* mapped_rows(const Rows& rows);

}  // namespace jitkern
