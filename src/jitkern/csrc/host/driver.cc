#include <dlfcn.h>
#include <jitkern/driver.h>
#include <tvm/ffi/error.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace jitkern {

namespace {

struct Loaded {
  Driver driver{};
  std::string error;  // empty if the driver is usable

  Loaded() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error =
          "jitkern: no CUDA driver (libcuda.so.1 was not found); install the NVIDIA driver, or "
          "start the container with GPU access";
      return;
    }
#define JITKERN_RESOLVE(name, parameters) resolve(library, #name, driver.name);
    JITKERN_DRIVER_SYMBOLS(JITKERN_RESOLVE)
#undef JITKERN_RESOLVE
    driver.cuFuncGetParamInfo =
        reinterpret_cast<decltype(driver.cuFuncGetParamInfo)>(dlsym(library, "cuFuncGetParamInfo"));
    if (!error.empty()) return;
    if (const CUresult result = driver.cuInit(0); result != kCudaSuccess) {
      const char* name = "unknown error";
      driver.cuGetErrorName(result, &name);
      error = std::string("jitkern: the CUDA driver did not start: ") + name +
              "; check `nvidia-smi` and CUDA_VISIBLE_DEVICES";
    }
  }

  template <class F>
  void resolve(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr && error.empty()) {
      error = std::string("jitkern: the CUDA driver has no ") + name +
              "; install a driver for CUDA 11.8 or newer";
    }
  }
};

const Loaded& loaded() {
  static const Loaded instance;
  return instance;
}

std::array<std::atomic<Device*>, kMaxDevices> devices;

int attribute_of(CUdevice handle, int attribute) {
  const Driver& driver = Driver::get();
  int value = 0;
  driver.check(driver.cuDeviceGetAttribute(&value, attribute, handle), "cuDeviceGetAttribute");
  return value;
}

CUdevice handle_of(int ordinal) {
  const Driver& driver = Driver::get();
  CUdevice handle = 0;
  driver.check(driver.cuDeviceGet(&handle, ordinal), "cuDeviceGet");
  return handle;
}

std::unique_ptr<Device> open_device(int ordinal) {
  const Driver& driver = Driver::get();
  const RelaxedCapture relaxed;
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  const CUdevice handle = handle_of(ordinal);
  driver.check(driver.cuDevicePrimaryCtxRetain(&device->context, handle),
               "cuDevicePrimaryCtxRetain");
  device->arch = arch_of(ordinal);
  device->num_sms = attribute_of(handle, kAttributeMultiprocessorCount);
  device->max_shared_bytes = attribute_of(handle, kAttributeMaxSharedBytesPerBlockOptin);
  int version = 0;
  driver.check(driver.cuDriverGetVersion(&version), "cuDriverGetVersion");
  device->knows_pdl =
      device->arch >= 90 && version >= 12030;  // from 12.3 on also inside CUDA graphs
  const ContextScope scope(*device);
  void* record = nullptr;
  driver.check(
      driver.cuMemHostAlloc(&record, sizeof(FaultRecord), kHostAllocPortable | kHostAllocDeviceMap),
      "cuMemHostAlloc");
  device->fault = new (record) FaultRecord{};
  CUdeviceptr mapped = 0;
  driver.check(driver.cuMemHostGetDevicePointer_v2(&mapped, record, 0),
               "cuMemHostGetDevicePointer");
  device->fault_device = reinterpret_cast<FaultRecord*>(mapped);
  return device;
}

}  // namespace

void raise_runtime_error(const std::string& message) {
  throw tvm::ffi::Error("RuntimeError", message, "");
}

const Driver& Driver::get() {
  if (!loaded().error.empty()) raise_runtime_error(loaded().error);
  return loaded().driver;
}

const Driver* Driver::get_or_null() { return loaded().error.empty() ? &loaded().driver : nullptr; }

void Driver::check(CUresult result, const char* what) const {
  if (result == kCudaSuccess) return;
  const char* name = "unknown error";
  const char* text = "";
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  raise_runtime_error(std::string("jitkern: ") + what + ": " + name + " (" + text + ")");
}

int arch_of(int ordinal) {
  const CUdevice handle = handle_of(ordinal);
  return 10 * attribute_of(handle, kAttributeComputeMajor) +
         attribute_of(handle, kAttributeComputeMinor);
}

Device* Device::find(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
  return devices[ordinal].load(std::memory_order_acquire);
}

Device& Device::get(int ordinal) {
  if (Device* device = find(ordinal)) return *device;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    raise_runtime_error("jitkern: device cuda:" + std::to_string(ordinal) + ", expected 0 to " +
                        std::to_string(kMaxDevices - 1));
  }
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (Device* device = find(ordinal)) return *device;
  Device* device = open_device(ordinal).release();  // lives as long as the process
  devices[ordinal].store(device, std::memory_order_release);
  return *device;
}

ContextScope::ContextScope(const Device& device) : previous_(nullptr), changed_(false) {
  const Driver& driver = Driver::get();
  driver.check(driver.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
  if (previous_ == device.context) return;
  driver.check(driver.cuCtxSetCurrent(device.context), "cuCtxSetCurrent");
  changed_ = true;
}

ContextScope::~ContextScope() {
  if (changed_) Driver::get().cuCtxSetCurrent(previous_);
}

MemoryRange memory_range(const void* address) {
  u32 type = 0;
  int ordinal = 0;
  CUdeviceptr device_address = 0;
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  int attributes[] = {kPointerMemoryType, kPointerDeviceOrdinal, kPointerDevicePointer,
                      kPointerRangeStart, kPointerRangeSize};
  void* values[] = {&type, &ordinal, &device_address, &begin, &bytes};
  const Driver& driver = Driver::get();
  // Succeeds for any address; what is unknown of one that CUDA has never seen stays zero.
  driver.check(
      driver.cuPointerGetAttributes(5, attributes, values, reinterpret_cast<CUdeviceptr>(address)),
      "cuPointerGetAttributes");
  return {type, ordinal, reinterpret_cast<const char*>(device_address),
          reinterpret_cast<const char*>(begin), static_cast<i64>(bytes)};
}

RelaxedCapture::RelaxedCapture() : mode_(kCaptureModeRelaxed) {
  const Driver& driver = Driver::get();
  driver.check(driver.cuThreadExchangeStreamCaptureMode(&mode_),
               "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { Driver::get().cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace jitkern
