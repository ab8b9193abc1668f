// The launches of swap_rows.
#pragma once

#include "pairs_host.h"
#include "swap.h"

namespace jitkern {

struct SwapCall {
  SwapParams params;
  HostTraffic traffic;
  int index_bytes;
  DLDevice device;
  i64 num_sms;  // of a large call
};

// Swaps in the order of the host's memory. `kernels` are those of the call's rows. Takes scratch
// memory from torch's caching allocator: a row of staging for each triple and the lists, 512 MiB at
// most.
void swap_in_order(const LaunchScope& scope, const SwapCall& call, const LoadedKernels& kernels);

}  // namespace jitkern
