// Launching a kernel that jitkern knows nothing of: DeviceModule.launch.
#include <jitkern/launch.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>

namespace jitkern {

namespace {

using tvm::ffi::Bytes;
using tvm::ffi::String;

void* const kKernelParams = reinterpret_cast<void*>(1);      // CU_LAUNCH_PARAM_BUFFER_POINTER
void* const kKernelParamsSize = reinterpret_cast<void*>(2);  // CU_LAUNCH_PARAM_BUFFER_SIZE

// Dynamic shared memory of a block beyond which a function has to ask for it.
constexpr i64 kFreeSharedBytes = 48 << 10;

// Lets `function` have all the shared memory that a block can. ValueError if `bytes` is still more.
void ask_for_shared_bytes(const Device& device, CUfunction function, i64 bytes) {
  const Driver& driver = Driver::get();
  CUdevice number = 0;
  int most = 0;
  int fixed = 0;
  driver.check(driver.cuDeviceGet(&number, device.ordinal), "cuDeviceGet");
  driver.check(driver.cuDeviceGetAttribute(&most, kAttributeMaxSharedBytesPerBlockOptin, number),
               "cuDeviceGetAttribute");
  driver.check(driver.cuFuncGetAttribute(&fixed, kFunctionSharedBytes, function),
               "cuFuncGetAttribute");
  if (bytes > most - fixed) {
    raise_value_error("launch", "shared_bytes", std::to_string(bytes),
                      "at most " + std::to_string(most - fixed) + " on this GPU");
  }
  driver.check(driver.cuFuncSetAttribute(function, kFunctionMaxDynamicSharedBytes, most - fixed),
               "cuFuncSetAttribute");
}

int64_t load_raw(Bytes image, String name, int64_t ordinal) {
  const Device& device = Device::get(static_cast<int>(ordinal));
  return static_cast<int64_t>(
      reinterpret_cast<intptr_t>(load_function(device, image, name.c_str())));
}

// `params` is the kernel's one parameter, byte for byte.
void launch_raw(int64_t function, int64_t ordinal, int64_t stream, Bytes params, int64_t grid_x,
                int64_t grid_y, int64_t grid_z, int64_t block_x, int64_t block_y, int64_t block_z,
                int64_t shared_bytes) {
  Device& device = Device::get(static_cast<int>(ordinal));
  check_pending_fault(device);
  const ContextScope scope(device);
  const auto handle = reinterpret_cast<CUfunction>(static_cast<intptr_t>(function));
  if (shared_bytes > kFreeSharedBytes) ask_for_shared_bytes(device, handle, shared_bytes);
  size_t size = params.size();
  void* extra[] = {kKernelParams, const_cast<char*>(params.data()), kKernelParamsSize, &size,
                   nullptr};
  const LaunchConfig config{static_cast<unsigned>(grid_x),
                            static_cast<unsigned>(grid_y),
                            static_cast<unsigned>(grid_z),
                            static_cast<unsigned>(block_x),
                            static_cast<unsigned>(block_y),
                            static_cast<unsigned>(block_z),
                            static_cast<unsigned>(shared_bytes),
                            reinterpret_cast<CUstream>(static_cast<intptr_t>(stream)),
                            nullptr,
                            0};
  const Driver& driver = Driver::get();
  driver.check(driver.cuLaunchKernelEx(&config, handle, nullptr, extra), "cuLaunchKernelEx");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_raw, load_raw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_raw, launch_raw);

}  // namespace jitkern
