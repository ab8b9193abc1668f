#include <dlfcn.h>
#include <jitkern/launch.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <mutex>

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::String;

// PyTorch's functions for the state of the calling thread. Python looks up their addresses, so that
// this builds without PyTorch. A call from Python takes 45 to 85 ns; here both take 3 ns.
int64_t (*num_dispatch_modes)() = nullptr;
void* const* (*jit_tracing_state)() = nullptr;  // points at a shared_ptr: null unless tracing
bool is_unknown = false;
int32_t (*get_torch_stream)(int32_t ordinal, void** stream) = nullptr;  // null without CUDA

void set_torch_state(int64_t num_modes_address, int64_t tracing_address, int64_t stream_address) {
  is_unknown = num_modes_address == 0 || tracing_address == 0;
  num_dispatch_modes = reinterpret_cast<int64_t (*)()>(num_modes_address);
  jit_tracing_state = reinterpret_cast<void* const* (*)()>(tracing_address);
  get_torch_stream = reinterpret_cast<int32_t (*)(int32_t, void**)>(stream_address);
}

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
    JITKERN_MORE_DRIVER_SYMBOLS(JITKERN_RESOLVE)
    error.clear();  // the functions above are optional
    JITKERN_DRIVER_SYMBOLS(JITKERN_RESOLVE)
#undef JITKERN_RESOLVE
    if (!error.empty()) return;
    if (const CUresult result = driver.cuInit(0); result != kCudaSuccess) {
      const char* name = "unknown error";
      driver.cuGetErrorName(result, &name);
      error = str("jitkern: the CUDA driver did not start: ", name,
                  "; check `nvidia-smi` and CUDA_VISIBLE_DEVICES");
    }
  }

  template <class F>
  void resolve(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr && error.empty()) {
      error = str("jitkern: the CUDA driver has no ", name,
                  "; install a driver for CUDA 11.8 or newer");
    }
  }
};

const Loaded& loaded() {
  static const Loaded instance;
  return instance;
}

std::array<std::atomic<Device*>, kMaxDevices> devices;

// 0 if there is no usable driver, as in driver_version().
int64_t device_count() {
  int count = 0;
  if (loaded().error.empty()) JITKERN_CU(cuDeviceGetCount, &count);
  return count;
}

std::unique_ptr<Device> open_device(int ordinal) {
  const RelaxedCapture relaxed;
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  const CUdevice handle = device_handle(ordinal);
  JITKERN_CU(cuDevicePrimaryCtxRetain, &device->context, handle);
  device->arch = 10 * device_attribute(handle, kAttributeComputeMajor) +
                 device_attribute(handle, kAttributeComputeMinor);
  device->num_sms = device_attribute(handle, kAttributeMultiprocessorCount);
  device->max_shared_bytes = device_attribute(handle, kAttributeMaxSharedBytesPerBlockOptin);
  device->max_pitch = device_attribute(handle, kAttributeMaxPitch);
  // Programmatic dependent launch works inside CUDA graphs from 12.3 on.
  device->knows_pdl = device->arch >= 90 && driver_version() >= 12030;
  const ContextScope scope(*device);
  device->fault = make_fault_record(&device->fault_device);
  return device;
}

}  // namespace

int device_attribute(CUdevice handle, int attribute) {
  int value = 0;
  JITKERN_CU(cuDeviceGetAttribute, &value, attribute, handle);
  return value;
}

CUdevice device_handle(i64 ordinal) {
  CUdevice handle = 0;
  JITKERN_CU(cuDeviceGet, &handle, static_cast<int>(ordinal));
  return handle;
}

bool torch_has_to_see_it() {
  if (num_dispatch_modes == nullptr || is_unknown) return is_unknown;
  return num_dispatch_modes() > 0 || *jit_tracing_state() != nullptr;
}

CUstream current_stream(int ordinal) {
  void* stream = TVMFFIEnvGetStream(kDLCUDA, ordinal);
  // Null means PyTorch's default stream, or that no argument was a tensor of PyTorch: then
  // PyTorch's current stream orders the call with new outputs and PyTorch's next op.
  if (stream == nullptr && get_torch_stream != nullptr) {
    void* current = nullptr;
    if (get_torch_stream(ordinal, &current) == 0) stream = current;
  }
  return static_cast<CUstream>(stream);
}

FaultRecord* make_fault_record(FaultRecord** on_device) {
  void* record = nullptr;
  JITKERN_CU(cuMemHostAlloc, &record, sizeof(FaultRecord),
             kHostAllocPortable | kHostAllocDeviceMap);
  CUdeviceptr mapped = 0;
  JITKERN_CU(cuMemHostGetDevicePointer_v2, &mapped, record, 0);
  *on_device = reinterpret_cast<FaultRecord*>(mapped);
  return new (record) FaultRecord{};
}

const Driver& Driver::get() {
  if (!loaded().error.empty()) raise_error("RuntimeError", loaded().error);
  return loaded().driver;
}

void Driver::check(CUresult result, const char* what) const {
  if (result == kCudaSuccess) return;
  const char* name = "unknown error";
  const char* text = "";
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  raise_error("RuntimeError", str("jitkern: ", what, ": ", name, " (", text, ")"));
}

Device* Device::find(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
  return devices[ordinal].load(std::memory_order_acquire);
}

Device& Device::get(int ordinal) {
  if (Device* device = find(ordinal)) return *device;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    raise_error("RuntimeError",
                str("jitkern: device cuda:", ordinal, ", expected 0 to ", kMaxDevices - 1));
  }
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (find(ordinal) == nullptr) devices[ordinal] = open_device(ordinal).release();  // never freed
  return *devices[ordinal];
}

ContextScope::ContextScope(const Device& device) : previous_(nullptr), own_(device.context) {
  JITKERN_CU(cuCtxGetCurrent, &previous_);
  if (previous_ != own_) JITKERN_CU(cuCtxSetCurrent, own_);
}

ContextScope::~ContextScope() {
  if (previous_ != own_) Driver::get().cuCtxSetCurrent(previous_);
}

RelaxedCapture::RelaxedCapture() : mode_(kCaptureModeRelaxed) {
  JITKERN_CU(cuThreadExchangeStreamCaptureMode, &mode_);
}

RelaxedCapture::~RelaxedCapture() { Driver::get().cuThreadExchangeStreamCaptureMode(&mode_); }

MemoryRange memory_range(const void* address) {
  MemoryRange range{};
  int attributes[] = {kPointerMemoryType, kPointerDeviceOrdinal, kPointerDevicePointer,
                      kPointerRangeStart, kPointerRangeSize};
  void* values[] = {&range.type, &range.ordinal, &range.device_address, &range.begin, &range.bytes};
  // Succeeds for any address; if it is unknown to CUDA, the values stay zero.
  JITKERN_CU(cuPointerGetAttributes, 5, attributes, values, reinterpret_cast<CUdeviceptr>(address));
  return range;
}

namespace {

// Set once from Python. Never destroyed: Python may be gone by then.
auto& resolver = *new Function();
void set_resolver(Function function) { resolver = std::move(function); }

std::mutex load_mutex;

CUmodule load_image(const Bytes& image, const char* op) {
  const Driver& driver = Driver::get();
  char log[8192] = "";
  int options[] = {kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
  CUmodule module = nullptr;
  const CUresult result = driver.cuModuleLoadDataEx(&module, image.data(), 2, options, values);
  driver.check(result, str(op, ": cuModuleLoadData ", log).c_str());
  return module;
}

Kernel load_kernel(CUmodule module, const char* name) {
  const Driver& driver = Driver::get();
  Kernel kernel{};
  driver.check(driver.cuModuleGetFunction(&kernel.function, module, name), name);
  const auto attribute = [&](int which) {
    int value = 0;
    JITKERN_CU(cuFuncGetAttribute, &value, which, kernel.function);
    return value;
  };
  kernel.max_threads = static_cast<unsigned>(attribute(kFunctionMaxThreadsPerBlock));
  kernel.own_shared_bytes = attribute(kFunctionSharedBytes);
  size_t offset = 0;
  size_t bytes = 0;
  const bool known = driver.cuFuncGetParamInfo != nullptr &&
                     driver.cuFuncGetParamInfo(kernel.function, 0, &offset, &bytes) == kCudaSuccess;
  kernel.params_bytes = known ? static_cast<i64>(bytes) : -1;
  return kernel;
}

// A user's kernel may use all shared memory of a block, and clusters of more than 8 blocks.
// jit/device.py renders its kNumThreads, 0 if it has none, as the size of an array, plus 1.
void prepare_users(Kernel& kernel, const Device& device, CUmodule module, const std::string& name) {
  JITKERN_CU(cuFuncSetAttribute, kernel.function, kFunctionMaxDynamicSharedBytes,
             device.max_shared_bytes - kernel.own_shared_bytes);
  if (device.arch >= 90) {
    JITKERN_CU(cuFuncSetAttribute, kernel.function, kFunctionNonPortableClusterSize, 1);
  }
  CUdeviceptr pointer = 0;
  size_t bytes = 1;
  JITKERN_CU(cuModuleGetGlobal_v2, &pointer, &bytes, module, ("jitkern_threads_" + name).c_str());
  kernel.num_threads = static_cast<unsigned>(bytes) - 1;
}

}  // namespace

const LoadedKernels& KernelTable::load(const Device& device, const Spec& spec) {
  const Function& resolve = resolve_ != nullptr ? resolve_ : resolver;
  // Python is called without a lock held: it may compile, and another thread may hold the GIL.
  Array<String> names;
  for (const char* name : names_) names.push_back(name);
  Array<int64_t> values;
  for (size_t i = 0; i < names.size(); ++i) values.push_back(spec.values[i]);
  const auto [image, entries, config] =
      resolve(op_, names, values, device.arch)
          .cast<tvm::ffi::Tuple<Bytes, Array<String>, Array<int64_t>>>();

  const std::lock_guard<std::mutex> lock(load_mutex);
  std::atomic<const LoadedKernels*>& head = heads_[device.ordinal];
  for (const LoadedKernels* other = head; other != nullptr; other = other->next) {
    if (other->spec == spec) return *other;  // another thread was first
  }
  const RelaxedCapture relaxed;
  const ContextScope scope(device);
  const CUmodule module = load_image(image, op_);
  auto loaded = std::make_unique<LoadedKernels>(LoadedKernels{spec, head, {}, {}, 0});
  for (const String& name : entries) {
    Kernel& kernel = loaded->entries.emplace_back(load_kernel(module, name.c_str()));
    if (shape_of_ == nullptr) prepare_users(kernel, device, module, name);
  }
  if (shape_of_ != nullptr) take_config(*loaded, config);
  head.store(loaded.get(), std::memory_order_release);
  return *loaded.release();  // lives as long as the process
}

void KernelTable::take_config(LoadedKernels& kernels, const Array<int64_t>& config) const {
  const size_t count = kernels.entries.size();
  bool fits = config.size() == 2 * count + 2;
  for (size_t i = 0; fits && i < count; ++i) {
    Kernel& kernel = kernels.entries[i];
    kernel.num_threads = static_cast<unsigned>(config[2 * i]);
    kernel.use_pdl = config[2 * i + 1] != 0;
    fits = kernel.num_threads >= 1 && kernel.num_threads <= kernel.max_threads;
  }
  if (!fits) raise_error("RuntimeError", str(op_, ": launched as it was not compiled"));
  kernels.in_flight = static_cast<int>(config[2 * count]);
  kernels.shape =
      shape_of_(kernels.spec, kernels.in_flight, static_cast<int>(config[2 * count + 1]));
}

void LaunchScope::fill_bytes(void* pointer, unsigned char value, i64 bytes) const {
  JITKERN_CU(cuMemsetD8Async, address(pointer), value, static_cast<size_t>(bytes), stream_);
}

void LaunchScope::launch_bytes(const Kernel& kernel, i64 grid_x, const void* params, i64 bytes,
                               unsigned num_threads, int grid_y, unsigned cluster,
                               i64 shared_bytes) const {
  if (kernel.params_bytes != bytes && kernel.params_bytes != -1) {  // a header has changed
    raise_error("RuntimeError", str("jitkern: a kernel's parameters are ", kernel.params_bytes,
                                    " bytes on the device and ", bytes, " on the host"));
  }
  Launch launch;
  launch.config.grid[0] = static_cast<unsigned>(grid_x);
  launch.config.grid[1] = static_cast<unsigned>(grid_y);
  launch.config.block[0] = num_threads;
  launch.config.shared_bytes = static_cast<unsigned>(shared_bytes);
  if (kernel.use_pdl && device.knows_pdl) launch.add(kLaunchProgrammaticStreamSerialization, 1);
  if (cluster > 1) launch.add(kLaunchClusterDimension, cluster, 1, 1);
  launch.run(kernel.function, stream_, params);
}

void LaunchScope::allow_shared_bytes(const Kernel& kernel, i64 shared_bytes) const {
  JITKERN_CU(cuFuncSetAttribute, kernel.function, kFunctionMaxDynamicSharedBytes,
             static_cast<int>(shared_bytes));
}

void Launch::run(CUfunction function, CUstream stream, const void* params) {
  config.stream = stream;
  config.attributes = attributes;
  void* arguments[] = {const_cast<void*>(params)};
  JITKERN_CU(cuLaunchKernelEx, &config, function, arguments, nullptr);
}

int64_t driver_version() {
  int version = 0;
  if (loaded().error.empty()) JITKERN_CU(cuDriverGetVersion, &version);
  return version;
}

tvm::ffi::Tensor allocate(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device) {
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() == nullptr) {
    raise_error("RuntimeError",
                "jitkern: this torch cannot be asked for memory through tvm-ffi; pip install "
                "torch-c-dlpack-ext, or torch 2.10 or newer");
  }
  return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, shape, dtype, device);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_torch_state, set_torch_state);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_resolver, set_resolver);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_count, device_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, driver_version);

}  // namespace jitkern
