// Moving vectors of 1 to 16 bytes, and the map from a flat vector number to a row and an offset.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

template <int kBytes>
struct VecOf;
template <>
struct VecOf<1> {
  using type = unsigned char;
};
template <>
struct VecOf<2> {
  using type = unsigned short;
};
template <>
struct VecOf<4> {
  using type = unsigned int;
};
template <>
struct VecOf<8> {
  using type = uint2;
};
template <>
struct VecOf<16> {
  using type = uint4;
};
template <int kBytes>
using Vec = typename VecOf<kBytes>::type;

template <int kBytes>
struct IndexOf;
template <>
struct IndexOf<4> {
  using type = i32;
};
template <>
struct IndexOf<8> {
  using type = i64;
};
template <int kBytes>
using Index = typename IndexOf<kBytes>::type;

// Every byte of a row is read once, so it should not push index lines out of L1.
template <int kBytes>
__device__ inline Vec<kBytes> load_once(const char* address) {
  return __ldcs(reinterpret_cast<const Vec<kBytes>*>(address));
}

template <int kBytes>
__device__ inline void store_once(char* address, Vec<kBytes> value) {
  *reinterpret_cast<Vec<kBytes>*>(address) = value;
}

// Rows are copied as one flat list of vectors: thread t of a tile takes vectors t, t + kThreads, ...
// so no lane idles whatever the row size is (a warp per 656-byte row would leave 23 of 64 lanes
// without work), and the division by the compile-time kVecsPerRow is a multiplication.
template <i64 kVecsPerRow>
struct FlatRows {
  i64 row;
  i32 vec;  // number of the vector inside its row

  __device__ explicit FlatRows(i64 flat) {
    static_assert(kVecsPerRow < (1ll << 31), "a row of at most 2^31 vectors");
    row = static_cast<i64>(static_cast<u64>(flat) / static_cast<u64>(kVecsPerRow));
    vec = static_cast<i32>(flat - row * kVecsPerRow);
  }
};

}  // namespace jitkern
