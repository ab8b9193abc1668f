// Used by the translation units of jit/device.py: a kernel class's launch bounds, and checks that
// the members of its Params have the types that jitkern assumes.
#pragma once

namespace jitkern {

// 0 if the class has none; the compiler takes 0 as no bound.
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

// -- members of Params; jit/params.py renders static_asserts of them

// `kind`: f is floating point, i an integer, b bool, ? a type that C++ lacks.
template <class T>
__device__ constexpr bool is_number(T, char kind, int bytes) {
  if (sizeof(T) != static_cast<unsigned>(bytes)) return false;
  const bool has_fraction = T(0.5) != T(0);  // or it is bool, where everything but 0 is 1
  return kind == (!has_fraction ? 'i' : T(2) == T(1) ? 'b' : 'f');
}

template <class T>
__device__ constexpr bool is_number(T*, char, int) {
  return false;
}

template <class T>
__device__ constexpr bool points_to(T, char, int) {
  return false;
}

// A pointer to numbers must fit the dtype; one to 1 or 2 bytes may be raw memory. Pointers to
// structs (float4, __half) and parameters of any dtype are not checked.
template <class T>
__device__ constexpr bool points_to(T*, char kind, int bytes) {
  if constexpr (__is_class(T) || __is_union(T) || __is_enum(T)) {
    return true;
  } else {
    if (bytes == 0 || sizeof(T) == 1) return true;
    if (sizeof(T) == 2 && bytes == 2) return true;
    return is_number(T(), kind, bytes);
  }
}

__device__ constexpr bool points_to(const void*, char, int) { return true; }
__device__ constexpr bool points_to(void*, char, int) { return true; }

template <class T>
__device__ constexpr const void* at(const T& member) {
  return (const void*)&member;  // only this cast removes __restrict__
}

}  // namespace jitkern
