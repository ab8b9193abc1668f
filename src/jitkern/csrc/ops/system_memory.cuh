// Memory that the host or another GPU writes while the kernel runs. Each load is executed, and
// bypasses L1, which does not see the stores of other devices.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

#ifdef JITKERN_EMULATED

template <class T>
T load_fresh(const T* from) {
  return emulate::load_system(from);
}
inline void store_fresh(uint4* to, const uint4& value) { emulate::store_system(to, value); }
using emulate::nanoseconds;

#else

// A load by one instruction. An acquire also clobbers memory: no later load is compiled before it.
#define JITKERN_LOAD(name, Type, instruction, letter, clobbers)  \
  __device__ inline Type name(const Type* from) {                \
    Type value;                                                  \
    asm volatile(instruction " %0, [%1];"                        \
                 : "=" letter(value)                             \
                 : "l"(__cvta_generic_to_global(from))clobbers); \
    return value;                                                \
  }

// Orders nothing: other loads may see older or newer values.
__device__ inline uint4 load_fresh(const uint4* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}
JITKERN_LOAD(load_fresh, u32, "ld.relaxed.sys.global.u32", "r", )
JITKERN_LOAD(load_fresh, u64, "ld.relaxed.sys.global.u64", "l", )

// Such loads see it. It orders nothing, and the words of a vector may arrive in any order.
__device__ inline void store_fresh(uint4* to, const uint4& value) {
  asm volatile(
      "st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
}

// Later loads see everything that was written before the store whose value this loads.
JITKERN_LOAD(load_acquire, u64, "ld.acquire.sys.global.b64", "l", : "memory")

// An acquire of this value sees everything that this thread wrote or saw before.
__device__ inline void store_release(u64* to, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value)
               : "memory");
}

// The same for memory that blocks of one GPU share.
JITKERN_LOAD(load_control, u64, "ld.acquire.gpu.global.b64", "l", : "memory")
JITKERN_LOAD(load_control, u32, "ld.acquire.gpu.global.u32", "r", : "memory")
__device__ inline void store_control(u64* to, u64 value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value)
               : "memory");
}
#undef JITKERN_LOAD

// Sets a word that is 0; returns its value before. An acquire: a fence would also wait for earlier
// loads.
__device__ inline u64 claim(u64* word, u64 value) {
  u64 before;
  asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], 0, %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(value)
               : "memory");
  return before;
}

// A clock that is the same for all blocks. It may stand still for a microsecond.
__device__ inline u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#endif

}  // namespace jitkern
