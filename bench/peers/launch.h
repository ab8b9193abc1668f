// The host part of the nvcc peers: checks, and a launch on torch's current stream.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>

namespace peer {

using i64 = std::int64_t;
using tvm::ffi::TensorView;

inline void check(bool holds, const char* expected) {
  TVM_FFI_CHECK(holds, ValueError) << "expected " << expected;
}

inline i64 row_bytes_of(const TensorView& rows) { return rows.size(1) * (rows.dtype().bits / 8); }

inline i64 row_stride_bytes_of(const TensorView& rows) {
  return rows.stride(0) * (rows.dtype().bits / 8);
}

template <typename T = char>
T* data_of(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), i64 blocks, int threads, const TensorView& on_gpu,
            Args... args) {
  const DLDevice device = on_gpu.device();
  check(device.device_type == kDLCUDA, "a tensor on the GPU");
  void* const stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
}

}  // namespace peer
