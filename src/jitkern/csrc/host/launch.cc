#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <mutex>
#include <string>

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;

// resolve(op, spec, arch) -> image bytes; set once from Python. Never destroyed, because Python may
// be gone when static objects are.
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

}  // namespace

CUfunction load_function(const Device& device, const Bytes& image, const char* name) {
  const Driver& driver = Driver::get();
  const RelaxedCapture relaxed;
  const ContextScope scope(device);
  CUfunction function = nullptr;
  driver.check(driver.cuModuleGetFunction(&function, load_image(driver, image, name), name), name);
  return function;
}

const Kernel* KernelTable::load(const Device& device, const Spec& spec) {
  if (resolver() == nullptr) {
    throw tvm::ffi::Error("RuntimeError", std::string(op_) + ": no kernel resolver was set", "");
  }
  // Python is called without a lock held: it may compile, and another thread may hold the GIL.
  Array<int64_t> values;
  for (int i = 0; i < spec.size; ++i) values.push_back(spec.values[i]);
  const Bytes image = resolver()(op_, values, device.arch).cast<Bytes>();

  const std::lock_guard<std::mutex> lock(load_mutex);
  std::atomic<Node*>& head = heads_[device.ordinal];
  for (Node* node = head.load(); node != nullptr; node = node->next) {
    if (node->spec == spec) return node->kernels.data();  // another thread was first
  }
  const Driver& driver = Driver::get();
  const RelaxedCapture relaxed;
  const ContextScope scope(device);
  const CUmodule module = load_image(driver, image, op_);
  auto node = std::make_unique<Node>(Node{spec, {}, head.load()});
  for (size_t i = 0; i < entries_.size(); ++i) {
    Kernel& kernel = node->kernels[i];
    driver.check(driver.cuModuleGetFunction(&kernel.function, module, entries_[i]), entries_[i]);
    int num_threads = 0;
    driver.check(
        driver.cuFuncGetAttribute(&num_threads, kFunctionMaxThreadsPerBlock, kernel.function),
        "cuFuncGetAttribute");
    kernel.num_threads = static_cast<unsigned>(num_threads);
  }
  head.store(node.get(), std::memory_order_release);
  return node.release()->kernels.data();  // lives as long as the process
}

void LaunchScope::fill_bytes(void* pointer, unsigned char value, i64 bytes) const {
  const Driver& driver = Driver::get();
  driver.check(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(pointer), value,
                                      static_cast<size_t>(bytes), stream_),
               "cuMemsetD8Async");
}

void LaunchScope::launch_with(const Kernel& kernel, i64 grid_x, int grid_y, int block_x,
                              void** arguments, bool use_pdl) const {
  LaunchAttribute attribute{};
  attribute.id = kLaunchProgrammaticStreamSerialization;
  attribute.value.enabled = 1;
  const LaunchConfig config{static_cast<unsigned>(grid_x),
                            static_cast<unsigned>(grid_y),
                            1,
                            static_cast<unsigned>(block_x),
                            1,
                            1,
                            0,
                            stream_,
                            use_pdl ? &attribute : nullptr,
                            use_pdl ? 1u : 0u};
  const Driver& driver = Driver::get();
  driver.check(driver.cuLaunchKernelEx(&config, kernel.function, arguments, nullptr),
               "cuLaunchKernelEx");
}

namespace {

void set_resolver(Function function) { resolver() = std::move(function); }

int64_t device_count() {
  const Driver* driver = Driver::get_or_null();
  int count = 0;
  if (driver != nullptr) driver->check(driver->cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int64_t device_arch(int64_t ordinal) {
  const Driver& driver = Driver::get();
  CUdevice device = 0;
  int major = 0;
  int minor = 0;
  driver.check(driver.cuDeviceGet(&device, static_cast<int>(ordinal)), "cuDeviceGet");
  driver.check(driver.cuDeviceGetAttribute(&major, kAttributeComputeMajor, device),
               "cuDeviceGetAttribute");
  driver.check(driver.cuDeviceGetAttribute(&minor, kAttributeComputeMinor, device),
               "cuDeviceGetAttribute");
  return 10 * major + minor;
}

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
