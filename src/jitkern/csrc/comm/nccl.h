// The functions of NCCL's C interface that we use. They are stable within 2.x, and resolved from
// the libnccl that Python names, so a build needs no NCCL header.
#pragma once

#include <jitkern/launch.h>

#include <string>

namespace jitkern {

using NcclResult = int;
using NcclComm = struct NcclCommOpaque*;
using NcclWindow = struct NcclWindowOpaque*;

enum : int {
  kNcclSuccess = 0,
  kNcclUndefined = -2147483647 - 1,  // a default in NcclConfig
  kNcclSymmetricWindow = 1,
};

// The oldest version supported, that of PyTorch 2.8: it registers memory as windows.
constexpr int kLeastNccl = 22700;

struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t of 2.18; later libraries accept it by its size and version. Calls block while they
// connect to other ranks: a non-blocking communicator passes every call to a thread of NCCL's, and
// takes 90 us of host time instead of 7 (2.28.9, two H200s).
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 1;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
};
static_assert(sizeof(NcclConfig) == 48, "ncclConfig_t of NCCL 2.18");

#define JITKERN_NCCL_SYMBOLS(USE)                                                                  \
  USE(ncclGetVersion, (int* version))                                                              \
  USE(ncclGetUniqueId, (NcclUniqueId * id))                                                        \
  USE(ncclCommInitRankConfig,                                                                      \
      (NcclComm * comm, int size, NcclUniqueId id, int rank, NcclConfig* config))                  \
  USE(ncclCommFinalize, (NcclComm comm))                                                           \
  USE(ncclCommDestroy, (NcclComm comm))                                                            \
  USE(ncclCommAbort, (NcclComm comm))                                                              \
  USE(ncclCommGetAsyncError, (NcclComm comm, NcclResult * result))                                 \
  USE(ncclAllReduce, (const void* x, void* output, size_t count, int dtype, int op, NcclComm comm, \
                      CUstream stream))                                                            \
  USE(ncclReduceScatter, (const void* x, void* output, size_t count, int dtype, int op,            \
                          NcclComm comm, CUstream stream))                                         \
  USE(ncclAllGather,                                                                               \
      (const void* x, void* output, size_t count, int dtype, NcclComm comm, CUstream stream))      \
  USE(ncclBroadcast, (const void* x, void* output, size_t count, int dtype, int root,              \
                      NcclComm comm, CUstream stream))                                             \
  USE(ncclSend,                                                                                    \
      (const void* x, size_t count, int dtype, int peer, NcclComm comm, CUstream stream))          \
  USE(ncclRecv, (void* x, size_t count, int dtype, int peer, NcclComm comm, CUstream stream))      \
  USE(ncclMemAlloc, (void** pointer, size_t bytes))                                                \
  USE(ncclMemFree, (void* pointer))                                                                \
  USE(ncclCommWindowRegister,                                                                      \
      (NcclComm comm, void* pointer, size_t bytes, NcclWindow* window, int flags))                 \
  USE(ncclCommWindowDeregister, (NcclComm comm, NcclWindow window))

struct Nccl {
#define JITKERN_DECLARE(name, parameters) NcclResult(*name) parameters;
  JITKERN_NCCL_SYMBOLS(JITKERN_DECLARE)
#undef JITKERN_DECLARE
  const char* (*ncclGetErrorString)(NcclResult result);
  const char* (*ncclGetLastError)(NcclComm comm);
  int version;

  // The library that `nccl_load` has loaded in this process.
  static const Nccl& get();

  // NCCL's text for a result.
  std::string text_of(NcclResult result) const;
  // RuntimeError naming `what` unless `result` is success.
  void check(NcclResult result, const char* what) const;
};

}  // namespace jitkern
