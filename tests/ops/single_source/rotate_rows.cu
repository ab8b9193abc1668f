// A kernel of the kind that users bring along: device code, checks and launch in one file, with a
// host function `run` that takes tensors. Row i of `dst` is row (i + shift) % num_rows of `src`.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <cstdint>

namespace {

struct RotateParams {
  char* __restrict__ dst;
  const char* __restrict__ src;
  int64_t num_rows;
  int64_t shift;
};

template <int64_t kRowBytes, int kThreads>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const __grid_constant__ RotateParams params) {
  using Word = uint32_t;
  constexpr int64_t kWords = kRowBytes / sizeof(Word);
  const int64_t total = params.num_rows * kWords;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t from = (i / kWords + params.shift) % params.num_rows;
    reinterpret_cast<Word*>(params.dst)[i] =
        reinterpret_cast<const Word*>(params.src)[from * kWords + i % kWords];
  }
}

template <int64_t kRowBytes, int kThreads, bool kCheck>
struct RotateRows {
  static_assert(kRowBytes % 4 == 0, "a row is a whole number of 4-byte words");

  static void run(tvm::ffi::TensorView dst, tvm::ffi::TensorView src, int64_t shift) {
    if constexpr (kCheck) {
      for (const tvm::ffi::TensorView& tensor : {dst, src}) {
        if (tensor.ndim() != 2 || tensor.size(1) * tensor.dtype().bits / 8 != kRowBytes) {
          TVM_FFI_THROW(ValueError) << "rotate_rows: expected rows of " << kRowBytes << " bytes";
        }
      }
      if (dst.size(0) != src.size(0)) {
        TVM_FFI_THROW(ValueError) << "rotate_rows: dst has " << dst.size(0) << " rows, src "
                                  << src.size(0);
      }
    }
    const int64_t num_rows = src.size(0);
    if (num_rows == 0) return;
    const RotateParams params{static_cast<char*>(dst.data_ptr()),
                              static_cast<const char*>(src.data_ptr()), num_rows,
                              (shift % num_rows + num_rows) % num_rows};
    const int64_t blocks = (num_rows * (kRowBytes / 4) + kThreads - 1) / kThreads;
    const DLDevice device = src.device();
    const auto stream =
        static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
    rotate_kernel<kRowBytes, kThreads>
        <<<static_cast<unsigned>(std::min<int64_t>(blocks, 1024)), kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      TVM_FFI_THROW(RuntimeError) << "rotate_rows: " << cudaGetErrorString(error);
    }
  }
};

}  // namespace
