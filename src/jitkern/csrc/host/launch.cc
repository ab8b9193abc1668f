#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <mutex>
#include <string>

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::String;

// Set once from Python. Never destroyed, because Python may be gone when static objects are.
Function& resolver() {
  static auto* function = new Function();
  return *function;
}

std::mutex load_mutex;

CUmodule load_image(const Driver& driver, const Bytes& image, const char* op) {
  char log[8192] = "";
  int options[] = {kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
  CUmodule module = nullptr;
  const CUresult result = driver.cuModuleLoadDataEx(&module, image.data(), 2, options, values);
  driver.check(result, (std::string(op) + ": cuModuleLoadData " + log).c_str());
  return module;
}

Kernel load_kernel(const Driver& driver, CUmodule module, const char* name) {
  Kernel kernel{};
  driver.check(driver.cuModuleGetFunction(&kernel.function, module, name), name);
  const auto attribute = [&](int which) {
    int value = 0;
    driver.check(driver.cuFuncGetAttribute(&value, which, kernel.function), "cuFuncGetAttribute");
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

// Lets launches of `kernel` have all the shared memory of a block and clusters of more than 8
// blocks, which a function has to ask for once.
void ask_for_all(const Driver& driver, const Device& device, const Kernel& kernel) {
  driver.check(driver.cuFuncSetAttribute(kernel.function, kFunctionMaxDynamicSharedBytes,
                                         device.max_shared_bytes - kernel.own_shared_bytes),
               "cuFuncSetAttribute");
  if (device.arch < 90) return;
  driver.check(driver.cuFuncSetAttribute(kernel.function, kFunctionNonPortableClusterSize, 1),
               "cuFuncSetAttribute");
}

}  // namespace

const LoadedKernels& KernelTable::load(const Device& device, const Spec& spec) {
  const Function& resolve = resolve_ != nullptr ? resolve_ : resolver();
  if (resolve == nullptr) raise_runtime_error(std::string(op_) + ": no kernel resolver was set");
  // Python is called without a lock held: it may compile, and another thread may hold the GIL.
  Array<String> names;
  for (const char* name : names_) names.push_back(name);
  Array<int64_t> values;
  for (int i = 0; i < spec.size; ++i) values.push_back(spec[i]);
  const auto [image, entries, config] =
      resolve(op_, names, values, device.arch)
          .cast<tvm::ffi::Tuple<Bytes, Array<String>, Array<int64_t>>>();

  const std::lock_guard<std::mutex> lock(load_mutex);
  std::atomic<Node*>& head = heads_[device.ordinal];
  for (Node* node = head.load(); node != nullptr; node = node->next) {
    if (node->kernels.spec == spec) return node->kernels;  // another thread was first
  }
  const Driver& driver = Driver::get();
  const RelaxedCapture relaxed;
  const ContextScope scope(device);
  const CUmodule module = load_image(driver, image, op_);
  auto node = std::make_unique<Node>(Node{{spec, {}, {}}, head.load()});
  for (const String& name : entries) {
    node->kernels.entries.push_back(load_kernel(driver, module, name.c_str()));
  }
  if (shape_of_ != nullptr) {
    take_config(node->kernels, config);
  } else {
    for (const Kernel& kernel : node->kernels.entries) ask_for_all(driver, device, kernel);
  }
  head.store(node.get(), std::memory_order_release);
  return node.release()->kernels;  // lives as long as the process
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
  if (!fits) raise_runtime_error(std::string(op_) + ": launched as it was not compiled");
  kernels.shape = shape_of_(kernels.spec, static_cast<int>(config[2 * count]),
                            static_cast<int>(config[2 * count + 1]));
}

void LaunchScope::fill_bytes(void* pointer, unsigned char value, i64 bytes) const {
  const Driver& driver = Driver::get();
  driver.check(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(pointer), value,
                                      static_cast<size_t>(bytes), stream_),
               "cuMemsetD8Async");
}

void LaunchScope::check_params(const Kernel& kernel, i64 bytes) {
  if (kernel.params_bytes == bytes || kernel.params_bytes == -1) return;
  raise_runtime_error("jitkern: a kernel's parameters are " + std::to_string(kernel.params_bytes) +
                      " bytes on the device and " + std::to_string(bytes) + " on the host");
}

void Launch::run(CUfunction function, CUstream stream, const void* params) {
  config.stream = stream;
  config.attributes = attributes;
  void* arguments[] = {const_cast<void*>(params)};
  const Driver& driver = Driver::get();
  driver.check(driver.cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

tvm::ffi::Tensor allocate(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device) {
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() == nullptr) {
    raise_runtime_error(
        "jitkern: this torch cannot be asked for memory through tvm-ffi; pip install "
        "torch-c-dlpack-ext, or torch 2.10 or newer");
  }
  return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, shape, dtype, device);
}

namespace {

void set_resolver(Function function) { resolver() = std::move(function); }

int64_t device_count() {
  const Driver* driver = Driver::get_or_null();
  int count = 0;
  if (driver != nullptr) driver->check(driver->cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int64_t device_arch(int64_t ordinal) { return arch_of(static_cast<int>(ordinal)); }

int64_t driver_version() {
  const Driver* driver = Driver::get_or_null();
  int version = 0;
  if (driver != nullptr) driver->check(driver->cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_resolver, set_resolver);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_count, device_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_arch, device_arch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, driver_version);

}  // namespace jitkern
