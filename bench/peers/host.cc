// The floors of the host side, for the host route: what a call costs before it does anything.
#include <dlfcn.h>
#include <jitkern/driver.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <chrono>
#include <cstdint>

namespace peer {

using tvm::ffi::Bytes;
using tvm::ffi::String;
using tvm::ffi::TensorView;

// A function of the CUDA driver, found when it is first called.
template <typename... Args>
struct Driver {
  const char* name;
  int (*function)(Args...) = nullptr;

  void operator()(Args... args) {
    if (function == nullptr) {
      void* const library = dlopen("libcuda.so.1", RTLD_NOW);
      TVM_FFI_CHECK(library != nullptr, RuntimeError) << "libcuda.so.1 cannot be opened";
      function = reinterpret_cast<int (*)(Args...)>(dlsym(library, name));
      TVM_FFI_CHECK(function != nullptr, RuntimeError) << name << " is not in libcuda.so.1";
    }
    const int result = function(args...);
    TVM_FFI_CHECK(result == 0, RuntimeError) << name << " returned " << result;
  }
};

using jitkern::PitchedCopy;
using jitkern::PitchedMemory;
using Address = jitkern::CUdeviceptr;
inline Driver<void**, const void*> load_module{"cuModuleLoadData"};
inline Driver<void**, void*, const char*> get_function{"cuModuleGetFunction"};
inline Driver<> synchronize{"cuCtxSynchronize"};
inline Driver<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
              void**, void**>
    launch_kernel{"cuLaunchKernel"};
inline Driver<Address, Address, std::size_t, void*> memcpy_async{"cuMemcpyAsync"};
inline Driver<const PitchedCopy*, void*> memcpy_2d_async{"cuMemcpy2DAsync_v2"};
inline Driver<void*, void*, void*, std::size_t, jitkern::CopyAttributes*, std::size_t*, std::size_t,
              std::size_t*, void*>
    memcpy_batch_async{"cuMemcpyBatchAsync"};

// Nanoseconds per bare cuLaunchKernel of `kernel` (one block of 128 threads, 88 bytes of
// parameters) on the current stream of the device, in a loop without Python.
inline double launch_loop(Bytes image, String kernel, std::int64_t device, std::int64_t calls) {
  void* module = nullptr;
  void* function = nullptr;
  load_module(&module, image.data());
  get_function(&function, module, kernel.c_str());
  void* const stream = TVMFFIEnvGetStream(kDLCUDA, static_cast<std::int32_t>(device));
  std::int64_t words[11] = {};
  void* parameters[] = {words};
  const auto launch = [&](std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      launch_kernel(function, 1, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr);
    }
  };
  launch(10);
  synchronize();
  const auto start = std::chrono::steady_clock::now();
  launch(calls);
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  synchronize();
  return taken.count() / static_cast<double>(calls);
}

inline PitchedMemory side_of(const TensorView& tensor, std::int64_t offset, std::int64_t pitch) {
  char* const memory = static_cast<char*>(tensor.data_ptr()) + offset;
  const bool on_host = tensor.device().device_type != kDLCUDA;
  PitchedMemory side{0, 0, on_host ? 1 : 2, nullptr, 0, nullptr, static_cast<std::size_t>(pitch)};
  if (on_host) side.host = memory;
  if (!on_host) side.device = reinterpret_cast<Address>(memory);
  return side;
}

inline void* stream_of(const TensorView& dst, const TensorView& src) {
  const auto device = dst.device().device_type == kDLCUDA ? dst.device() : src.device();
  return TVMFFIEnvGetStream(kDLCUDA, device.device_id);
}

// One call of the driver for all copies; addresses and sizes are int64 on the CPU.
inline void copy_batch(TensorView src, TensorView dst, TensorView sizes, TensorView on_gpu) {
  jitkern::CopyAttributes attributes{jitkern::kSrcAccessOrderStream, {}, {}, 0};
  std::size_t first = 0, failed = 0;
  memcpy_batch_async(dst.data_ptr(), src.data_ptr(), sizes.data_ptr(),
                     static_cast<std::size_t>(sizes.size(0)), &attributes, &first, 1, &failed,
                     stream_of(on_gpu, on_gpu));
}

// A strided copy for each of the `pairs`, int64 on the CPU, of blocks [layers, blocks, bytes].
inline void copy_2d_loop(TensorView dst, TensorView src, TensorView pairs) {
  const std::int64_t width = dst.size(2);
  const auto* pair = static_cast<const std::int64_t*>(pairs.data_ptr());
  void* const stream = stream_of(dst, src);
  for (const auto* end = pair + 2 * pairs.size(0); pair != end; pair += 2) {
    const PitchedCopy copy{side_of(src, pair[0] * width, src.stride(0)),
                           side_of(dst, pair[1] * width, dst.stride(0)),
                           static_cast<std::size_t>(width), static_cast<std::size_t>(dst.size(0))};
    memcpy_2d_async(&copy, stream);
  }
}

// A copy for each row of `descriptors`, [n, 3] of int64 on the CPU: (source, destination, bytes).
inline void copy_pieces_loop(TensorView dst, TensorView src, TensorView descriptors) {
  const auto to = reinterpret_cast<Address>(dst.data_ptr());
  const auto from = reinterpret_cast<Address>(src.data_ptr());
  const auto* row = static_cast<const std::int64_t*>(descriptors.data_ptr());
  void* const stream = stream_of(dst, src);
  for (const auto* end = row + 3 * descriptors.size(0); row != end; row += 3) {
    memcpy_async(to + Address(row[1]), from + Address(row[0]), std::size_t(row[2]), stream);
  }
}

// As many bytes of both in one piece.
inline void copy_bytes(TensorView dst, TensorView src, std::int64_t num_bytes) {
  memcpy_async(reinterpret_cast<Address>(dst.data_ptr()), reinterpret_cast<Address>(src.data_ptr()),
               static_cast<std::size_t>(num_bytes), stream_of(dst, src));
}

}  // namespace peer
