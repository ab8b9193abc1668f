// Memory that the host, or another GPU, writes while the kernel runs. A load is made each time and
// comes from where all see the same: not from L1, which other devices' stores do not reach.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

#ifdef JITKERN_EMULATED

template <class T>
T load_fresh(const T* from) {
  return emulate::load_system(from);
}
template <class T>
T load_acquire(const T* from) {
  return emulate::load_system(from);
}
template <class T>
T load_control(const T* from) {
  return emulate::load_system(from);
}
inline void store_fresh(uint4* to, const uint4& value) { emulate::store_system(to, value); }
inline void store_release(u64* to, u64 value) { emulate::store_system(to, value); }
inline void store_control(u64* to, u64 value) { emulate::store_system(to, value); }
using emulate::claim;
using emulate::nanoseconds;

#else

// Orders nothing: what else is loaded may be older or newer.
__device__ inline uint4 load_fresh(const uint4* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}
__device__ inline u32 load_fresh(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}
__device__ inline u64 load_fresh(const u64* from) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}

// Seen by such loads. It orders nothing, and the words of a vector come in any order.
__device__ inline void store_fresh(uint4* to, const uint4& value) {
  asm volatile(
      "st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
}

// All that was written before the store that this sees is seen by the loads after it.
__device__ inline u64 load_acquire(const u64* from) {
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}

// Who loads this value by an acquire sees all that this thread wrote, and what it had seen.
__device__ inline void store_release(u64* to, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value)
               : "memory");
}

// The same for memory that blocks of one GPU share.
__device__ inline u64 load_control(const u64* from) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}
__device__ inline u32 load_control(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}
__device__ inline void store_control(u64* to, u64 value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value)
               : "memory");
}

// Makes a word that is 0 another one; returns what it was. As an acquire, and as one that waits for
// no earlier load, which a fence would do.
__device__ inline u64 claim(u64* word, u64 value) {
  u64 before;
  asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], 0, %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(value)
               : "memory");
  return before;
}

// Of a clock that all blocks read alike. It may stand still for a microsecond.
__device__ inline u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#endif

// Waits until that clock shows `due_ns`, and returns when the next turn is due: `pace_ns` later, or
// at once if this one came too late. Lower halves of times, less than 2 s apart: a kernel that has
// no register to spare keeps one.
__device__ inline u32 wait_for_turn(u32 due_ns, u32 pace_ns) {
  u32 now = static_cast<u32>(nanoseconds());
  while (static_cast<i32>(now - due_ns) < 0) {
#ifndef JITKERN_EMULATED
    __nanosleep(100);
#endif
    now = static_cast<u32>(nanoseconds());
  }
  due_ns += pace_ns;
  return static_cast<i32>(now - due_ns) < 0 ? due_ns : now;
}

}  // namespace jitkern
