#include "comm/vmm.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

namespace jitkern {

namespace {

struct Loaded {
  Vmm vmm{};
  std::string lacking;

  Loaded() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define JITKERN_RESOLVE(name, parameters)                                                         \
  vmm.name =                                                                                      \
      reinterpret_cast<decltype(vmm.name)>(library == nullptr ? nullptr : dlsym(library, #name)); \
  if (vmm.name == nullptr && lacking.empty()) lacking = #name;
    JITKERN_VMM_SYMBOLS(JITKERN_RESOLVE)
#undef JITKERN_RESOLVE
  }
};

CUdevice device_of(int64_t ordinal) {
  CUdevice device = 0;
  const Driver& driver = Driver::get();
  driver.check(driver.cuDeviceGet(&device, static_cast<int>(ordinal)), "cuDeviceGet");
  return device;
}

// What all processes know this GPU by, in hexadecimal digits.
tvm::ffi::String gpu_uuid(int64_t ordinal) {
  GpuUuid uuid{};
  Driver::get().check(Vmm::get().cuDeviceGetUuid_v2(&uuid, device_of(ordinal)), "cuDeviceGetUuid");
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

bool gpu_reaches(int64_t ordinal, int64_t other) {
  int can = 0;
  Driver::get().check(Vmm::get().cuDeviceCanAccessPeer(&can, device_of(ordinal), device_of(other)),
                      "cuDeviceCanAccessPeer");
  return can != 0;
}

// What memory of this GPU that goes to another process comes in pieces of; 0: there is none.
int64_t gpu_granularity(int64_t ordinal) {
  const Driver& driver = Driver::get();
  for (const int attribute : {kAttributeKnowsVmm, kAttributeExportsFds}) {
    int has = 0;
    driver.check(driver.cuDeviceGetAttribute(&has, attribute, device_of(ordinal)),
                 "cuDeviceGetAttribute");
    if (has == 0) return 0;
  }
  const VmmProperties properties = vmm_properties(static_cast<int>(ordinal), true);
  size_t bytes = 0;
  driver.check(Vmm::get().cuMemGetAllocationGranularity(&bytes, &properties, kVmmLeastGranularity),
               "cuMemGetAllocationGranularity");
  return static_cast<int64_t>(bytes);
}

}  // namespace

const Vmm& Vmm::get() {
  Driver::get();  // which has the words for a driver that is not there
  static const Loaded loaded;
  if (!loaded.lacking.empty()) {
    throw tvm::ffi::Error("RuntimeError",
                          "jitkern: the CUDA driver has no " + loaded.lacking +
                              "; install a driver for CUDA 11.8 or newer",
                          "");
  }
  return loaded.vmm;
}

VmmProperties vmm_properties(int ordinal, bool is_exported) {
  VmmProperties properties{};
  properties.type = kVmmPinned;
  properties.handle_types = is_exported ? kVmmAsFd : 0;
  properties.location = {kVmmOnDevice, ordinal};
  return properties;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gpu_uuid, gpu_uuid);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gpu_reaches, gpu_reaches);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gpu_granularity, gpu_granularity);

}  // namespace jitkern
