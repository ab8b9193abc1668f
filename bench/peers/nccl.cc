// ncclAllReduce with nothing around it but an FFI call: the floor of what a communicator costs.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace peer {

using tvm::ffi::Bytes;
using tvm::ffi::String;
using tvm::ffi::TensorView;

struct UniqueId {
  char bytes[128];
};
using GetUniqueId = int (*)(UniqueId*);
using InitRank = int (*)(void** comm, int size, UniqueId id, int rank);
using AllReduce = int (*)(const void*, void*, size_t, int, int, void*, void*);

inline void* library = nullptr;
inline AllReduce nccl_all_reduce = nullptr;

template <class F>
F symbol(const char* name) {
  void* const found = dlsym(library, name);
  if (found == nullptr) throw tvm::ffi::Error("RuntimeError", std::string("no ") + name, "");
  return reinterpret_cast<F>(found);
}

inline void open(String path) {
  library = dlopen(path.c_str(), RTLD_NOW);
  if (library == nullptr) throw tvm::ffi::Error("RuntimeError", dlerror(), "");
  nccl_all_reduce = symbol<AllReduce>("ncclAllReduce");
}

inline Bytes unique_id() {
  UniqueId id{};
  symbol<GetUniqueId>("ncclGetUniqueId")(&id);
  return Bytes(id.bytes, sizeof(id.bytes));
}

inline std::int64_t communicator(Bytes id_bytes, std::int64_t size, std::int64_t rank) {
  UniqueId id{};
  std::memcpy(id.bytes, id_bytes.data(), sizeof(id.bytes));
  void* comm = nullptr;
  const int result = symbol<InitRank>("ncclCommInitRank")(&comm, static_cast<int>(size), id,
                                                          static_cast<int>(rank));
  if (result != 0) throw tvm::ffi::Error("RuntimeError", "ncclCommInitRank", "");
  return reinterpret_cast<std::int64_t>(comm);
}

// The sum, of `dtype` as NCCL numbers them, in place on torch's current stream.
inline std::int64_t all_reduce(TensorView x, std::int64_t count, std::int64_t dtype,
                               std::int64_t comm) {
  void* const stream = TVMFFIEnvGetStream(kDLCUDA, x.device().device_id);
  return nccl_all_reduce(x.data_ptr(), x.data_ptr(), static_cast<size_t>(count),
                         static_cast<int>(dtype), 0, reinterpret_cast<void*>(comm), stream);
}

}  // namespace peer
