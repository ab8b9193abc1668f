// The speed of a GPU's PCIe link, from sysfs.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// A figure in bytes, or bytes per time, that was measured over PCIe 5.0 x16 (H100, H200), scaled to
// the link of the GPU `ordinal`. Unchanged if that link is unknown.
i64 scaled_to_link(int ordinal, i64 figure);

}  // namespace jitkern
