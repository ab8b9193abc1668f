// Programmatic dependent launch (compute capability 9.0 and up): the next kernel of the stream may
// start its prologue while this one drains. Users may include it.
#pragma once

namespace jitkern {

// Waits until every earlier kernel of the stream has finished and its writes are visible.
template <bool kUsePdl>
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kUsePdl) asm volatile("griddepcontrol.wait;" ::: "memory");
#elif defined(JITKERN_EMULATED)
  if constexpr (kUsePdl) emulate::wait_for_earlier_kernels();
#endif
}

// Lets the next kernel of the stream start once all blocks have called this.
template <bool kUsePdl>
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kUsePdl) asm volatile("griddepcontrol.launch_dependents;");
#elif defined(JITKERN_EMULATED)
  if constexpr (kUsePdl) emulate::let_next_kernel_start();
#endif
}

}  // namespace jitkern
