// Whether a member of a kernel's Params is what jitkern takes it for: the static_asserts that ask
// this are rendered beside the kernel, see jit/render.py.
#pragma once

namespace jitkern {

// `kind` is f for floating point, i for an integer, b for bool, ? for what is no type of C++.
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

// A pointer to a type of the language is to that of the dtype; one to 1 or 2 bytes may be raw
// memory. Structs (float4, __half) are looked at by nobody but the kernel, as is what was declared
// as of any dtype.
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
  return (const void*)&member;  // what is __restrict__ goes by such a cast only
}

}  // namespace jitkern
