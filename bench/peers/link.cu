// Peers of h2d_gather and d2h_scatter: row pairs[i][0] of src to row pairs[i][1] of dst, one side
// in pinned host memory. Rows are a multiple of 16 bytes.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>

namespace link_peer {

using tvm::ffi::TensorView;

struct Job {
  char* __restrict__ dst;
  const char* __restrict__ src;
  const int2* __restrict__ pairs;  // x: source row, y: destination row
  std::int64_t num_pairs;
  std::int64_t row_bytes;

  __device__ char* to(std::int64_t i) const { return dst + pairs[i].y * row_bytes; }
  __device__ const char* from(std::int64_t i) const { return src + pairs[i].x * row_bytes; }
};

__device__ inline std::int64_t warp_index() {
  return (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
}
__device__ inline std::int64_t num_warps() { return std::int64_t{gridDim.x} * (blockDim.x / 32); }

// One warp a row, all loads before all stores; 4 loads of 16 bytes in flight per lane.
__global__ void __launch_bounds__(1024) loads_before_stores(const __grid_constant__ Job job) {
  constexpr int kBatch = 4;
  const std::int64_t num_vecs = job.row_bytes / 16;
  for (std::int64_t i = warp_index(); i < job.num_pairs; i += num_warps()) {
    auto* to = reinterpret_cast<uint4*>(job.to(i));
    const auto* from = reinterpret_cast<const uint4*>(job.from(i));
    for (std::int64_t base = threadIdx.x % 32; base < num_vecs; base += 32 * kBatch) {
      uint4 value[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j * 32 < num_vecs) value[j] = from[base + j * 32];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j * 32 < num_vecs) to[base + j * 32] = value[j];
      }
    }
  }
}

// Several rows in flight per warp, and lanes counted from the 128-byte line below the row:
// a row of 656 bytes then asks for 6 lines instead of 7.
template <int kRows, int kSteps>
__global__ void __launch_bounds__(1024) line_aligned(const __grid_constant__ Job job) {
  const std::int64_t lane_byte = (threadIdx.x % 32) * 16;
  for (std::int64_t first = warp_index() * kRows; first < job.num_pairs;
       first += num_warps() * kRows) {
    char* to[kRows];
    const char* from[kRows];
    std::int64_t begin[kRows];  // of this lane relative to its row; negative in the first line
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t i = first + r < job.num_pairs ? first + r : job.num_pairs - 1;
      to[r] = job.to(i);
      from[r] = job.from(i);
      begin[r] =
          lane_byte - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(from[r]) % 128);
    }
    for (std::int64_t step = 0; step < job.row_bytes + 112; step += 512 * kSteps) {
      uint4 value[kRows][kSteps];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const std::int64_t at = begin[r] + step + s * 512;
          if (at >= 0 && at < job.row_bytes) {
            value[r][s] = *reinterpret_cast<const uint4*>(from[r] + at);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const std::int64_t at = begin[r] + step + s * 512;
          if (at >= 0 && at < job.row_bytes) *reinterpret_cast<uint4*>(to[r] + at) = value[r][s];
        }
      }
    }
  }
}

// The SM path's own ceiling: full lines, in order, as much in flight as line_aligned.
__global__ void __launch_bounds__(1024)
    contiguous(char* __restrict__ dst, const char* __restrict__ src, std::int64_t num_vecs) {
  constexpr int kSteps = 8;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x * kSteps;
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t base = warp_index() * 32 * kSteps; base < num_vecs; base += stride) {
    uint4 value[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const std::int64_t at = base + s * 32 + lane;
      if (at < num_vecs) value[s] = reinterpret_cast<const uint4*>(src)[at];
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const std::int64_t at = base + s * 32 + lane;
      if (at < num_vecs) reinterpret_cast<uint4*>(dst)[at] = value[s];
    }
  }
}

inline void check_cuda(cudaError_t error) {
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
}

inline cudaStream_t stream_of(const TensorView& a, const TensorView& b) {
  const DLDevice device = a.device().device_type == kDLCUDA ? a.device() : b.device();
  TVM_FFI_CHECK(device.device_type == kDLCUDA, ValueError) << "expected one side on the GPU";
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline Job job_of(const TensorView& src, const TensorView& dst, const TensorView& pairs) {
  const std::int64_t row_bytes = src.size(1) * (src.dtype().bits / 8);
  TVM_FFI_CHECK(row_bytes % 16 == 0 && row_bytes == dst.size(1) * (dst.dtype().bits / 8),
                ValueError)
      << "expected equal rows of a multiple of 16 bytes";
  TVM_FFI_CHECK(pairs.dtype().bits == 32 && pairs.size(1) == 2, TypeError)
      << "pairs: expected int32 [n, 2]";
  return Job{static_cast<char*>(dst.data_ptr()), static_cast<const char*>(src.data_ptr()),
             static_cast<const int2*>(pairs.data_ptr()), pairs.size(0), row_bytes};
}

// num_blocks 0: as many blocks of 256 threads as the rows need; else a persistent grid of
// num_blocks x 1024 threads.
inline void gather(bool is_aligned, TensorView src, TensorView dst, TensorView pairs,
                   std::int64_t num_blocks) {
  const Job job = job_of(src, dst, pairs);
  if (job.num_pairs == 0) return;
  const cudaStream_t stream = stream_of(src, dst);
  const unsigned threads = num_blocks > 0 ? 1024 : 256;
  const bool is_small = is_aligned && job.row_bytes + 112 <= 1024;
  const std::int64_t per_block = threads / 32 * (is_small ? 4 : 1);
  const auto grid = static_cast<unsigned>(
      num_blocks > 0 ? num_blocks : (job.num_pairs + per_block - 1) / per_block);
  if (!is_aligned) {
    loads_before_stores<<<grid, threads, 0, stream>>>(job);
  } else if (is_small) {
    line_aligned<4, 2><<<grid, threads, 0, stream>>>(job);
  } else {
    line_aligned<1, 8><<<grid, threads, 0, stream>>>(job);
  }
  check_cuda(cudaGetLastError());
}

inline void copy_contiguous(TensorView src, TensorView dst, std::int64_t num_bytes,
                            std::int64_t num_blocks) {
  contiguous<<<static_cast<unsigned>(num_blocks), 1024, 0, stream_of(src, dst)>>>(
      static_cast<char*>(dst.data_ptr()), static_cast<const char*>(src.data_ptr()), num_bytes / 16);
  check_cuda(cudaGetLastError());
}

}  // namespace link_peer
