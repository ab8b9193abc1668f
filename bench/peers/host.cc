// The floors of the host side, for the host route: what a call costs before it does anything.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace peer {

using tvm::ffi::Bytes;
using tvm::ffi::String;
using tvm::ffi::TensorView;

inline void noop(TensorView, TensorView, TensorView, TensorView, TensorView) {}
inline std::int64_t noop_pair(TensorView x, TensorView) { return x.size(0); }

// Length of the common prefix, as plain C++ has it.
template <typename Key>
std::int64_t mismatch_of(const TensorView& x, const TensorView& y) {
  const auto* a = static_cast<const Key*>(x.data_ptr());
  const auto* b = static_cast<const Key*>(y.data_ptr());
  const std::int64_t n = std::min(x.size(0), y.size(0));
  return std::mismatch(a, a + n, b).first - a;
}

inline std::int64_t common_prefix(TensorView x, TensorView y) {
  return x.dtype().bits == 32 ? mismatch_of<std::int32_t>(x, y) : mismatch_of<std::int64_t>(x, y);
}

// Equal or not: less than a prefix length, and the speed of light on equal keys.
inline std::int64_t same_bytes(TensorView x, TensorView y) {
  const std::int64_t n = std::min(x.size(0), y.size(0));
  const auto size = static_cast<std::size_t>(n * (x.dtype().bits / 8));
  return std::memcmp(x.data_ptr(), y.data_ptr(), size) == 0 ? n : -1;
}

inline void* driver_symbol(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  TVM_FFI_CHECK(library != nullptr, RuntimeError) << "libcuda.so.1 cannot be opened";
  void* const symbol = dlsym(library, name);
  TVM_FFI_CHECK(symbol != nullptr, RuntimeError) << name << " is not in libcuda.so.1";
  return symbol;
}

inline void check_driver(int result) {
  TVM_FFI_CHECK(result == 0, RuntimeError) << "the CUDA driver returned " << result;
}

// Nanoseconds per bare cuLaunchKernel of `kernel` (one block of 128 threads, 88 bytes of
// parameters) on the current stream of the device, in a loop without Python.
inline double launch_loop(Bytes image, String kernel, std::int64_t device, std::int64_t calls) {
  using Handle = void*;
  using Load = int (*)(Handle*, const void*);
  using Find = int (*)(Handle*, Handle, const char*);
  using Launch = int (*)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, Handle, void**, void**);
  using Unload = int (*)(Handle);
  using Sync = int (*)();
  const auto load = reinterpret_cast<Load>(driver_symbol("cuModuleLoadData"));
  const auto find = reinterpret_cast<Find>(driver_symbol("cuModuleGetFunction"));
  const auto launch = reinterpret_cast<Launch>(driver_symbol("cuLaunchKernel"));
  const auto unload = reinterpret_cast<Unload>(driver_symbol("cuModuleUnload"));
  const auto sync = reinterpret_cast<Sync>(driver_symbol("cuCtxSynchronize"));

  Handle module = nullptr;
  Handle function = nullptr;
  check_driver(load(&module, image.data()));
  check_driver(find(&function, module, kernel.c_str()));
  Handle const stream = TVMFFIEnvGetStream(kDLCUDA, static_cast<std::int32_t>(device));
  std::int64_t words[11] = {};
  void* parameters[] = {words};
  const auto once = [&] {
    return launch(function, 1, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr);
  };
  for (int i = 0; i < 10; ++i) check_driver(once());
  check_driver(sync());

  int result = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < calls; ++i) result |= once();
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  check_driver(result);
  check_driver(sync());
  check_driver(unload(module));
  return taken.count() / static_cast<double>(calls);
}

// CUDA_MEMCPY2D.
struct Side {
  std::size_t x_bytes, y;
  int type;
  void* host;
  unsigned long long device;
  void* array;
  std::size_t pitch;
};
struct Copy2D {
  Side src, dst;
  std::size_t width, height;
};

inline Side side_of(const TensorView& tensor, std::int64_t offset, std::int64_t pitch) {
  char* const memory = static_cast<char*>(tensor.data_ptr()) + offset;
  const bool on_host = tensor.device().device_type != kDLCUDA;
  Side side{0, 0, on_host ? 1 : 2, nullptr, 0, nullptr, static_cast<std::size_t>(pitch)};
  if (on_host) side.host = memory;
  if (!on_host) side.device = reinterpret_cast<unsigned long long>(memory);
  return side;
}

inline void* stream_of(const TensorView& dst, const TensorView& src) {
  const auto device = dst.device().device_type == kDLCUDA ? dst.device() : src.device();
  return TVMFFIEnvGetStream(kDLCUDA, device.device_id);
}

inline void copy_2d_on(const Copy2D& copy, void* stream) {
  using Call = int (*)(const Copy2D*, void*);
  static const auto call = reinterpret_cast<Call>(driver_symbol("cuMemcpy2DAsync_v2"));
  check_driver(call(&copy, stream));
}

// One strided copy by the driver, with nothing around it.
inline void copy_2d(TensorView dst, TensorView src, std::int64_t dpitch, std::int64_t spitch,
                    std::int64_t width, std::int64_t height) {
  copy_2d_on({side_of(src, 0, spitch), side_of(dst, 0, dpitch), static_cast<std::size_t>(width),
              static_cast<std::size_t>(height)},
             stream_of(dst, src));
}

// As many bytes of both in one piece.
inline void copy_bytes(TensorView dst, TensorView src, std::int64_t num_bytes) {
  using Call = int (*)(unsigned long long, unsigned long long, std::size_t, void*);
  static const auto call = reinterpret_cast<Call>(driver_symbol("cuMemcpyAsync"));
  const auto address = [](const TensorView& tensor) {
    return reinterpret_cast<unsigned long long>(tensor.data_ptr());
  };
  check_driver(
      call(address(dst), address(src), static_cast<std::size_t>(num_bytes), stream_of(dst, src)));
}

// A copy for each row of `descriptors`, [n, 3] of int64 on the CPU.
inline void copy_pieces_loop(TensorView dst, TensorView src, TensorView descriptors) {
  using Call = int (*)(unsigned long long, unsigned long long, std::size_t, void*);
  static const auto call = reinterpret_cast<Call>(driver_symbol("cuMemcpyAsync"));
  const auto to = reinterpret_cast<unsigned long long>(dst.data_ptr());
  const auto from = reinterpret_cast<unsigned long long>(src.data_ptr());
  const auto* row = static_cast<const std::int64_t*>(descriptors.data_ptr());
  void* const stream = stream_of(dst, src);
  for (const auto* end = row + 3 * descriptors.size(0); row != end; row += 3) {
    const auto offset = [row](int i) { return static_cast<unsigned long long>(row[i]); };
    check_driver(call(to + offset(1), from + offset(0), static_cast<std::size_t>(row[2]), stream));
  }
}

// One call of the driver for all copies; addresses and sizes are int64 on the CPU.
inline void copy_batch(TensorView src, TensorView dst, TensorView sizes, TensorView on_gpu) {
  struct Attributes {
    int order;  // 1: that of the stream
    int hints[4];
    unsigned flags;
  } attributes{1, {}, 0};
  using Call = int (*)(void*, void*, void*, std::size_t, Attributes*, std::size_t*, std::size_t,
                       std::size_t*, void*);
  static const auto call = reinterpret_cast<Call>(driver_symbol("cuMemcpyBatchAsync"));
  std::size_t first = 0, failed = 0;
  check_driver(call(dst.data_ptr(), src.data_ptr(), sizes.data_ptr(),
                    static_cast<std::size_t>(sizes.size(0)), &attributes, &first, 1, &failed,
                    stream_of(on_gpu, on_gpu)));
}

// A strided copy for each of the `pairs`, int64 on the CPU, of blocks [layers, blocks, bytes].
inline void copy_2d_loop(TensorView dst, TensorView src, TensorView pairs) {
  const std::int64_t width = dst.size(2);
  const auto* pair = static_cast<const std::int64_t*>(pairs.data_ptr());
  void* const stream = stream_of(dst, src);
  for (const auto* end = pair + 2 * pairs.size(0); pair != end; pair += 2) {
    copy_2d_on(
        {side_of(src, pair[0] * width, src.stride(0)), side_of(dst, pair[1] * width, dst.stride(0)),
         static_cast<std::size_t>(width), static_cast<std::size_t>(dst.size(0))},
        stream);
  }
}

}  // namespace peer
