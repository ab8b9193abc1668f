// Peers of store_cache, indexing and h2d_gather: single-source nvcc kernels in the style of
// mini-sglang. A warp moves a row whose size is fixed at compile time and is a multiple of 128
// bytes, so every lane has work in every step.
#include <type_traits>

#include "launch.h"

namespace peer {

constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ __forceinline__ i64 warp_index() { return i64{blockIdx.x} * kWarps + threadIdx.x / 32; }
inline i64 blocks_of(i64 warps) { return (warps + kWarps - 1) / kWarps; }

template <int kRowBytes>
__device__ __forceinline__ void warp_copy(void* __restrict__ dst, const void* __restrict__ src) {
  static_assert(kRowBytes % 128 == 0, "a warp moves whole lines of 128 bytes");
  using Narrow = std::conditional_t<kRowBytes % 256 == 0, uint2, unsigned>;
  using Unit = std::conditional_t<kRowBytes % 512 == 0, uint4, Narrow>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int at = 0; at < kRowBytes / int{sizeof(Unit)}; at += 32) {
    static_cast<Unit*>(dst)[at + lane] = static_cast<const Unit*>(src)[at + lane];
  }
}

template <int kRowBytes>
__global__ void __launch_bounds__(kThreads, 1)
    store_rows(char* __restrict__ k_cache, char* __restrict__ v_cache,
               const int* __restrict__ indices, const char* __restrict__ k,
               const char* __restrict__ v, i64 cache_stride, i64 input_stride, i64 length) {
  const i64 row = warp_index();
  if (row >= length) return;
  const i64 to = indices[row] * cache_stride, from = row * input_stride;
  warp_copy<kRowBytes>(k_cache + to, k + from);
  warp_copy<kRowBytes>(v_cache + to, v + from);
}

template <int kRowBytes>
void store(TensorView k_cache, TensorView v_cache, TensorView indices, TensorView k, TensorView v) {
  check(row_bytes_of(k) == kRowBytes && row_bytes_of(k_cache) == kRowBytes,
        "rows of the compiled size");
  check(indices.dtype().bits == 32, "indices of int32");
  const i64 length = indices.size(0);
  launch(store_rows<kRowBytes>, blocks_of(length), kThreads, k_cache, data_of(k_cache),
         data_of(v_cache), data_of<int>(indices), data_of(k), data_of(v),
         row_stride_bytes_of(k_cache), row_stride_bytes_of(k), length);
}

// Rows outside [start, start + count) become zeros.
template <int kRowBytes, int kSplits>
__global__ void __launch_bounds__(kThreads, 1)
    gather_rows(char* __restrict__ output, const char* __restrict__ weights,
                const int* __restrict__ indices, i64 length, i64 start, i64 count) {
  constexpr int kPartBytes = kRowBytes / kSplits;
  const i64 warp = warp_index();
  if (warp >= length * kSplits) return;
  const i64 row = warp / kSplits, part = (warp % kSplits) * kPartBytes;
  const i64 from = indices[row] - start;
  char* to = output + row * kRowBytes + part;
  if (from >= 0 && from < count) {
    warp_copy<kPartBytes>(to, weights + from * kRowBytes + part);
  } else {
    for (int at = threadIdx.x % 32; at < kPartBytes / 4; at += 32) {
      reinterpret_cast<unsigned*>(to)[at] = 0;
    }
  }
}

template <int kRowBytes, int kSplits>
void index(TensorView weights, TensorView indices, TensorView output, i64 start, i64 count) {
  static_assert(kRowBytes % kSplits == 0, "a row is a whole number of splits");
  check(row_bytes_of(weights) == kRowBytes && row_bytes_of(output) == kRowBytes,
        "rows of the compiled size");
  check(indices.dtype().bits == 32, "indices of int32");
  const i64 length = indices.size(0);
  launch(gather_rows<kRowBytes, kSplits>, blocks_of(length * kSplits), kThreads, weights,
         data_of(output), data_of(weights), data_of<int>(indices), length, start, count);
}

template <int kRowBytes>
__global__ void __launch_bounds__(kThreads, 1)
    gather_pairs(char* __restrict__ dst, const char* __restrict__ src,
                 const int2* __restrict__ pairs, i64 length) {
  const i64 i = warp_index();
  if (i >= length) return;
  const int2 pair = pairs[i];
  warp_copy<kRowBytes>(dst + i64{pair.y} * kRowBytes, src + i64{pair.x} * kRowBytes);
}

template <int kRowBytes>
void gather(TensorView src, TensorView dst, TensorView pairs) {
  check(row_bytes_of(src) == kRowBytes && row_bytes_of(dst) == kRowBytes,
        "rows of the compiled size");
  check(pairs.dtype().bits == 32 && pairs.size(1) == 2, "pairs of int32");
  const i64 length = pairs.size(0);
  launch(gather_pairs<kRowBytes>, blocks_of(length), kThreads, dst, data_of(dst), data_of(src),
         data_of<int2>(pairs), length);
}

}  // namespace peer
