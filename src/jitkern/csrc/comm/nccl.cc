#include "comm/nccl.h"

#include <dlfcn.h>
#include <tvm/ffi/string.h>

#include <atomic>

namespace jitkern {

namespace {

using tvm::ffi::Bytes;
using tvm::ffi::String;

std::atomic<const Nccl*> library{nullptr};  // never freed

// Returns "2.28.9" for 22809.
std::string name_of(int version) {
  return str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

template <class F>
void resolve(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
}

// Loads the library, and returns the version, such as "2.28.9". RuntimeError if it is not NCCL, or
// too old.
String nccl_load(String path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) raise_error("RuntimeError", dlerror());
  Nccl loaded{};
  bool is_complete = true;
#define JITKERN_RESOLVE(name, parameters) \
  resolve(handle, #name, loaded.name);    \
  is_complete = is_complete && loaded.name != nullptr;
  JITKERN_NCCL_SYMBOLS(JITKERN_RESOLVE)
#undef JITKERN_RESOLVE
  resolve(handle, "ncclGetErrorString", loaded.ncclGetErrorString);
  resolve(handle, "ncclGetLastError", loaded.ncclGetLastError);
  if (loaded.ncclGetVersion != nullptr) loaded.ncclGetVersion(&loaded.version);
  if (!is_complete || loaded.version < kLeastNccl) {
    const std::string came = loaded.version > 0 ? "NCCL " + name_of(loaded.version) : "no NCCL";
    dlclose(handle);
    raise_error("RuntimeError",
                str(std::string(path), ": ", came, ", expected NCCL 2.27 or newer"));
  }
  library = new Nccl(loaded);
  return name_of(loaded.version);
}

Bytes nccl_unique_id() {
  NcclUniqueId id{};
  Nccl::get().check(Nccl::get().ncclGetUniqueId(&id), "ncclGetUniqueId");
  return Bytes(id.bytes, sizeof(id.bytes));
}

}  // namespace

const Nccl& Nccl::get() {
  if (library == nullptr) raise_error("RuntimeError", "NCCL is not loaded");
  return *library;
}

std::string Nccl::text_of(NcclResult result) const {
  // The last error of the process: NCCL ignores the communicator.
  const char* const last = ncclGetLastError(nullptr);
  const std::string text = ncclGetErrorString(result);
  return last == nullptr || *last == '\0' ? text : text + ": " + last;
}

void Nccl::check(NcclResult result, const char* what) const {
  if (result != kNcclSuccess) raise_error("RuntimeError", str(what, ": ", text_of(result)));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_load, nccl_load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_unique_id, nccl_unique_id);

}  // namespace jitkern
