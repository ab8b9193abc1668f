// Batches of rows, which the warps of a few blocks go through until none is left.
#pragma once

#include <jitkern/copy.cuh>

namespace jitkern {

// Calls `copy(group)` for each share of `num_rows` rows, a warp of them at a time; 2^32 of these
// would be terabytes. `last_batch` in device memory is the one that was taken last, -1: none. Warps
// take batches from it as they come free, because beside a GEMM one block may start 1 ms after the
// other, and so that those under way lie close to each other in the order of the rows. Null: equal
// shares.
template <class Rows, class Copy>
__device__ inline void for_batches(i64 num_rows, u32* last_batch, const Copy& copy) {
  const u32 num_batches = static_cast<u32>((Rows::kShape.num_threads(num_rows) + 31) / 32);
  const bool as_they_come = last_batch != nullptr;
  const auto take = [last_batch] {  // the number of the next batch, in lane 0
    return threadIdx.x % 32 == 0 ? atomicAdd(last_batch, 1u) + 1u : 0u;
  };
  u32 batch = as_they_come ? take() : static_cast<u32>(thread_number() / 32);
  while (true) {
    if (as_they_come) batch = __shfl_sync(0xffffffffu, batch, 0);
    if (batch >= num_batches) return;
    const Rows group(i64(batch) * 32 + threadIdx.x % 32);
    // The next one before the rows, so that the answer comes while they do.
    batch = as_they_come ? take() : batch + gridDim.x * (blockDim.x / 32);
    copy(group);
  }
}

}  // namespace jitkern
