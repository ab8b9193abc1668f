// The launch bounds of a kernel's class, for jit/device.py. 0 if it has none, which the compiler
// takes for no bound.
#pragma once

namespace jitkern {

template <class Kernel>
__device__ constexpr auto num_threads(int) -> decltype(Kernel::kNumThreads) {
  return Kernel::kNumThreads;
}
template <class Kernel>
__device__ constexpr int num_threads(...) {
  return 0;
}

template <class Kernel>
__device__ constexpr auto min_blocks(int) -> decltype(Kernel::kMinBlocks) {
  return Kernel::kMinBlocks;
}
template <class Kernel>
__device__ constexpr int min_blocks(...) {
  return 0;
}

}  // namespace jitkern
