// The part of NCCL that is used, by its C interface, which stays the same within 2.x: resolved from
// a libnccl that Python names, so that building this needs no header of NCCL and loading it no
// NCCL.
#pragma once

#include <jitkern/launch.h>

#include <string>

namespace jitkern {

using NcclResult = int;
using NcclComm = struct NcclCommOpaque*;
using NcclWindow = struct NcclWindowOpaque*;

enum : int {
  kNcclSuccess = 0,
  kNcclUndefined = -2147483647 - 1,  // of a number in the configuration
  kNcclSymmetricWindow = 1,
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclUint32 = 3,
  kNcclInt64 = 4,
  kNcclUint64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
  kNcclFloat8E4m3 = 10,
  kNcclFloat8E5m2 = 11,
};

// The least version: the configuration below is its.
constexpr int kLeastNccl = 21800;
constexpr int kNcclWithFloat8 = 22400;

struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t as of 2.18. A later library takes it for what it is, by its size and version. Calls
// block while they connect to other ranks: one without blocking hands every call to a thread of
// NCCL's, and takes 90 us of the host where a blocking one takes 7 (2.28.9, two H200s).
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kLeastNccl;
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
  USE(ncclGroupStart, ())                                                                          \
  USE(ncclGroupEnd, ())

// What only newer ones have: null in the others.
#define JITKERN_NCCL_LATER(USE)                                                      \
  USE(ncclMemAlloc, (void** pointer, size_t bytes))                                  \
  USE(ncclMemFree, (void* pointer))                                                  \
  USE(ncclCommRegister, (NcclComm comm, void* pointer, size_t bytes, void** handle)) \
  USE(ncclCommDeregister, (NcclComm comm, void* handle))                             \
  USE(ncclCommWindowRegister,                                                        \
      (NcclComm comm, void* pointer, size_t bytes, NcclWindow* window, int flags))   \
  USE(ncclCommWindowDeregister, (NcclComm comm, NcclWindow window))

struct Nccl {
#define JITKERN_DECLARE(name, parameters) NcclResult(*name) parameters;
  JITKERN_NCCL_SYMBOLS(JITKERN_DECLARE)
  JITKERN_NCCL_LATER(JITKERN_DECLARE)
#undef JITKERN_DECLARE
  const char* (*ncclGetErrorString)(NcclResult result);
  const char* (*ncclGetLastError)(NcclComm comm);
  int version;

  // The library that `nccl_load` has loaded; one for the whole process.
  static const Nccl& get();

  // "2.28.9"
  std::string version_name() const;
  // What NCCL says of a result.
  std::string text_of(NcclResult result) const;
  // RuntimeError naming `what` unless `result` is success.
  void check(NcclResult result, const char* what) const;
};

}  // namespace jitkern
