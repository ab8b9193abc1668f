// Peers of h2d_gather and d2h_scatter: row pairs[i][0] of src to row pairs[i][1] of dst, one side
// in pinned host memory. Rows are a multiple of 16 bytes.
#include "launch.h"

namespace peer {

struct Job {
  char* __restrict__ dst;
  const char* __restrict__ src;
  const int2* __restrict__ pairs;  // x: source row, y: destination row
  i64 num_pairs, row_bytes;

  __device__ char* to(i64 i) const { return dst + pairs[i].y * row_bytes; }
  __device__ const char* from(i64 i) const { return src + pairs[i].x * row_bytes; }
};

__device__ inline i64 warp_index() { return (i64{blockIdx.x} * blockDim.x + threadIdx.x) / 32; }
__device__ inline i64 num_warps() { return i64{gridDim.x} * (blockDim.x / 32); }

// kSteps loads of 16 bytes per lane and row, then their stores: of the bytes from `begin` + `step`
// on, 512 apart, that lie in [0, num_bytes).
template <int kRows, int kSteps>
__device__ __forceinline__ void move(char* const (&to)[kRows], const char* const (&from)[kRows],
                                     const i64 (&begin)[kRows], i64 step, i64 num_bytes) {
  uint4 value[kRows][kSteps];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const i64 at = begin[r] + step + s * 512;
      if (at >= 0 && at < num_bytes) value[r][s] = *reinterpret_cast<const uint4*>(from[r] + at);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const i64 at = begin[r] + step + s * 512;
      if (at >= 0 && at < num_bytes) *reinterpret_cast<uint4*>(to[r] + at) = value[r][s];
    }
  }
}

// One warp a row, all loads before all stores; 4 loads of 16 bytes in flight per lane.
__global__ void __launch_bounds__(1024) loads_before_stores(const __grid_constant__ Job job) {
  for (i64 i = warp_index(); i < job.num_pairs; i += num_warps()) {
    char* const to[] = {job.to(i)};
    const char* const from[] = {job.from(i)};
    for (i64 at = threadIdx.x % 32 * 16; at < job.row_bytes; at += 512 * 4) {
      move<1, 4>(to, from, {at}, 0, job.row_bytes);
    }
  }
}

// Several rows in flight per warp, and lanes counted from the 128-byte line below the row:
// a row of 656 bytes then asks for 6 lines instead of 7.
template <int kRows, int kSteps>
__global__ void __launch_bounds__(1024) line_aligned(const __grid_constant__ Job job) {
  for (i64 first = warp_index() * kRows; first < job.num_pairs; first += num_warps() * kRows) {
    char* to[kRows];
    const char* from[kRows];
    i64 begin[kRows];  // of this lane relative to its row; negative in the first line
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const i64 i = first + r < job.num_pairs ? first + r : job.num_pairs - 1;
      to[r] = job.to(i);
      from[r] = job.from(i);
      begin[r] = threadIdx.x % 32 * 16 - i64(reinterpret_cast<std::uintptr_t>(from[r]) % 128);
    }
    for (i64 step = 0; step < job.row_bytes + 112; step += 512 * kSteps) {
      move<kRows, kSteps>(to, from, begin, step, job.row_bytes);
    }
  }
}

// The SM path's own ceiling: full lines, in order, as much in flight as line_aligned.
__global__ void __launch_bounds__(1024)
    contiguous(char* __restrict__ dst, const char* __restrict__ src, i64 num_bytes) {
  for (i64 at = warp_index() * 512 * 8; at < num_bytes; at += num_warps() * 512 * 8) {
    move<1, 8>({dst}, {src}, {at + threadIdx.x % 32 * 16}, 0, num_bytes);
  }
}

inline const TensorView& on_gpu(const TensorView& a, const TensorView& b) {
  return a.device().device_type == kDLCUDA ? a : b;
}

// num_blocks 0: as many blocks of 256 threads as the rows need; else a persistent grid of
// num_blocks x 1024 threads.
inline void gather(bool is_aligned, TensorView src, TensorView dst, TensorView pairs,
                   i64 num_blocks) {
  const Job job{data_of(dst), data_of(src), data_of<int2>(pairs), pairs.size(0), row_bytes_of(src)};
  check(job.row_bytes % 16 == 0 && job.row_bytes == row_bytes_of(dst), "rows of n x 16 bytes");
  check(pairs.dtype().bits == 32 && pairs.size(1) == 2, "pairs of int32");
  const int threads = num_blocks > 0 ? 1024 : 256;
  const bool is_small = is_aligned && job.row_bytes + 112 <= 1024;
  const i64 per_block = threads / 32 * (is_small ? 4 : 1);
  const i64 blocks = num_blocks > 0 ? num_blocks : (job.num_pairs + per_block - 1) / per_block;
  auto* const aligned = is_small ? line_aligned<4, 2> : line_aligned<1, 8>;
  launch(is_aligned ? aligned : loads_before_stores, blocks, threads, on_gpu(src, dst), job);
}

inline void copy_contiguous(TensorView src, TensorView dst, i64 num_bytes, i64 num_blocks) {
  launch(contiguous, num_blocks, 1024, on_gpu(src, dst), data_of(dst), data_of(src), num_bytes);
}

}  // namespace peer
