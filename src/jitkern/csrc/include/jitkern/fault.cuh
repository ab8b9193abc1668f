// Reporting an index that is out of range (design: the row is skipped, the host raises later).
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// Keeps the first fault until the host has read it. The plain read in front keeps a batch full of
// bad indices from sending one atomic each over PCIe. On PCIe the compare-and-swap is atomic among
// the threads of this device, which is what is needed: the host only ever turns 2 into 0.
__device__ inline void report_fault(FaultRecord* record, FaultSite site, i64 position, i64 value,
                                    i64 bound) {
  volatile FaultRecord* seen = record;
  if (seen->state != 0 || atomicCAS(&record->state, 0u, 1u) != 0u) return;
  seen->site = site;
  seen->position = position;
  seen->value = value;
  seen->bound = bound;
  __threadfence_system();
  seen->state = 2;
}

}  // namespace jitkern
