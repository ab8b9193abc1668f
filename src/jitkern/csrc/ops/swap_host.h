// The launches of swap_rows.
#pragma once

#include <optional>

#include "pairs_host.h"
#include "swap.h"

namespace jitkern {

// What a large call has on its way by default, in each direction: rows of 656 bytes on 4 SMs move
// 76.0 GB/s both ways together, on 8 as much, on 2 59.5.
constexpr i64 kSwapBytesInFlight = 256 << 10;

struct SwapCall {
  SwapParams params;
  HostTraffic traffic;
  int index_bytes;
  DLDevice device;
  std::optional<i64> num_sms;  // as the caller says
};

// Swaps in the order of the host's memory. `kernels` are those of the call's rows. Takes scratch
// memory from torch's caching allocator: a row of staging for each triple and the lists, 512 MiB at
// most.
void swap_in_order(const LaunchScope& scope, const SwapCall& call, const LoadedKernels& kernels);

}  // namespace jitkern
