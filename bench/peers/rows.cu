// Peers of store_cache, indexing and h2d_gather: single-source nvcc kernels in the style of
// mini-sglang. A warp moves a row whose size is fixed at compile time and is a multiple of 128
// bytes, so every lane has work in every step; the host part checks, then launches on the current
// stream.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>

namespace peer {

using tvm::ffi::TensorView;

template <int kBytes>
struct LaneUnit;
template <>
struct LaneUnit<4> {
  using type = std::uint32_t;
};
template <>
struct LaneUnit<8> {
  using type = uint2;
};
template <>
struct LaneUnit<16> {
  using type = uint4;
};

template <int kRowBytes>
__device__ __forceinline__ void warp_copy(void* __restrict__ dst, const void* __restrict__ src) {
  static_assert(kRowBytes % 128 == 0, "a warp moves whole lines of 128 bytes");
  constexpr int kUnit = kRowBytes % 512 == 0 ? 16 : kRowBytes % 256 == 0 ? 8 : 4;
  using Unit = typename LaneUnit<kUnit>::type;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kRowBytes / (32 * kUnit); ++step) {
    static_cast<Unit*>(dst)[step * 32 + lane] = static_cast<const Unit*>(src)[step * 32 + lane];
  }
}

template <int kRowBytes>
__device__ __forceinline__ void warp_zero(void* dst) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kRowBytes / 128; ++step) {
    static_cast<std::uint32_t*>(dst)[step * 32 + lane] = 0;
  }
}

inline cudaStream_t stream_of(const TensorView& tensor) {
  const DLDevice device = tensor.device();
  TVM_FFI_CHECK(device.device_type == kDLCUDA, ValueError) << "expected CUDA tensors";
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline void check_launch() {
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
}

inline std::int64_t row_bytes_of(const TensorView& rows) {
  return rows.size(1) * (rows.dtype().bits / 8);
}

inline std::int64_t row_stride_bytes_of(const TensorView& rows) {
  return rows.stride(0) * (rows.dtype().bits / 8);
}

struct StoreParams {
  void* __restrict__ k_cache;
  void* __restrict__ v_cache;
  const std::int32_t* __restrict__ indices;
  const void* __restrict__ k;
  const void* __restrict__ v;
  std::int64_t cache_stride_bytes;
  std::int64_t input_stride_bytes;
  std::int64_t length;
};

template <int kRowBytes, int kThreads, int kMaxOccupancy>
__global__ void __launch_bounds__(kThreads, kMaxOccupancy)
    store_rows(const __grid_constant__ StoreParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= p.length) return;
  const std::int64_t slot = p.indices[row];
  const auto to = slot * p.cache_stride_bytes;
  const auto from = row * p.input_stride_bytes;
  warp_copy<kRowBytes>(static_cast<char*>(p.k_cache) + to, static_cast<const char*>(p.k) + from);
  warp_copy<kRowBytes>(static_cast<char*>(p.v_cache) + to, static_cast<const char*>(p.v) + from);
}

template <int kRowBytes, int kThreads = 128, int kMaxOccupancy = 1>
struct StoreKernel {
  static void run(TensorView k_cache, TensorView v_cache, TensorView indices, TensorView k,
                  TensorView v) {
    TVM_FFI_CHECK(row_bytes_of(k) == kRowBytes && row_bytes_of(k_cache) == kRowBytes, ValueError)
        << "expected rows of " << kRowBytes << " bytes";
    TVM_FFI_CHECK(indices.dtype().bits == 32, TypeError) << "indices: expected int32";
    const StoreParams params{k_cache.data_ptr(),
                             v_cache.data_ptr(),
                             static_cast<const std::int32_t*>(indices.data_ptr()),
                             k.data_ptr(),
                             v.data_ptr(),
                             row_stride_bytes_of(k_cache),
                             row_stride_bytes_of(k),
                             indices.size(0)};
    constexpr int kWarps = kThreads / 32;
    const auto blocks = static_cast<unsigned>((params.length + kWarps - 1) / kWarps);
    store_rows<kRowBytes, kThreads, kMaxOccupancy>
        <<<blocks, kThreads, 0, stream_of(k_cache)>>>(params);
    check_launch();
  }
};

struct IndexParams {
  void* __restrict__ output;
  const void* __restrict__ weights;
  const std::int32_t* __restrict__ indices;
  std::int64_t length;
  std::int64_t start;  // rows outside [start, start + count) become zeros
  std::int64_t count;
};

template <int kRowBytes, int kSplits, int kThreads, int kMaxOccupancy>
__global__ void __launch_bounds__(kThreads, kMaxOccupancy)
    gather_rows(const __grid_constant__ IndexParams p) {
  constexpr int kPartBytes = kRowBytes / kSplits;
  const std::int64_t warp = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (warp >= p.length * kSplits) return;
  const std::int64_t row = warp / kSplits;
  const std::int64_t part = (warp % kSplits) * kPartBytes;
  const std::int64_t from = p.indices[row] - p.start;
  char* to = static_cast<char*>(p.output) + row * kRowBytes + part;
  if (from >= 0 && from < p.count) {
    warp_copy<kPartBytes>(to, static_cast<const char*>(p.weights) + from * kRowBytes + part);
  } else {
    warp_zero<kPartBytes>(to);
  }
}

template <int kRowBytes, int kSplits, int kThreads = 128, int kMaxOccupancy = 1>
struct IndexKernel {
  static_assert(kRowBytes % kSplits == 0, "a row is a whole number of splits");

  static void run(TensorView weights, TensorView indices, TensorView output, std::int64_t start,
                  std::int64_t count) {
    TVM_FFI_CHECK(row_bytes_of(weights) == kRowBytes && row_bytes_of(output) == kRowBytes,
                  ValueError)
        << "expected rows of " << kRowBytes << " bytes";
    TVM_FFI_CHECK(indices.dtype().bits == 32, TypeError) << "indices: expected int32";
    const IndexParams params{output.data_ptr(),
                             weights.data_ptr(),
                             static_cast<const std::int32_t*>(indices.data_ptr()),
                             indices.size(0),
                             start,
                             count};
    constexpr int kWarps = kThreads / 32;
    const auto blocks = static_cast<unsigned>((params.length * kSplits + kWarps - 1) / kWarps);
    gather_rows<kRowBytes, kSplits, kThreads, kMaxOccupancy>
        <<<blocks, kThreads, 0, stream_of(weights)>>>(params);
    check_launch();
  }
};

template <int kRowBytes, int kThreads, int kMaxOccupancy>
__global__ void __launch_bounds__(kThreads, kMaxOccupancy)
    gather_pairs(void* __restrict__ dst, const void* __restrict__ src,
                 const int2* __restrict__ pairs, std::int64_t length) {
  const std::int64_t i = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (i >= length) return;
  const int2 pair = pairs[i];
  warp_copy<kRowBytes>(static_cast<char*>(dst) + std::int64_t{pair.y} * kRowBytes,
                       static_cast<const char*>(src) + std::int64_t{pair.x} * kRowBytes);
}

template <int kRowBytes, int kThreads = 128, int kMaxOccupancy = 1>
struct GatherKernel {
  static void run(TensorView src, TensorView dst, TensorView pairs) {
    TVM_FFI_CHECK(row_bytes_of(src) == kRowBytes && row_bytes_of(dst) == kRowBytes, ValueError)
        << "expected rows of " << kRowBytes << " bytes";
    TVM_FFI_CHECK(pairs.dtype().bits == 32 && pairs.size(1) == 2, TypeError)
        << "pairs: expected int32 [n, 2]";
    constexpr int kWarps = kThreads / 32;
    const std::int64_t length = pairs.size(0);
    const auto blocks = static_cast<unsigned>((length + kWarps - 1) / kWarps);
    gather_pairs<kRowBytes, kThreads, kMaxOccupancy><<<blocks, kThreads, 0, stream_of(dst)>>>(
        dst.data_ptr(), src.data_ptr(), static_cast<const int2*>(pairs.data_ptr()), length);
    check_launch();
  }
};

}  // namespace peer
