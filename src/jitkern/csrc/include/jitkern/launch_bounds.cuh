// What a kernel's class says of its blocks, 0 where it says nothing: a launch bound of 0 is none to
// the compiler. jit/render.py asks for both.
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
