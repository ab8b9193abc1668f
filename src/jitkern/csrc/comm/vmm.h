// Device memory that processes hand to each other: what of the CUDA driver makes, maps and exports
// it. Resolved from libcuda when it is first asked for, which most processes never do.
#pragma once

#include <jitkern/launch.h>

namespace jitkern {

using CUmemHandle = u64;  // CUmemGenericAllocationHandle

// Values of cuda.h that are part of the driver's stable ABI.
enum : int {
  kCudaErrorOutOfMemory = 2,
  kAttributeKnowsVmm = 102,    // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
  kAttributeExportsFds = 103,  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
  kVmmPinned = 1,
  kVmmOnDevice = 1,
  kVmmAsFd = 1,
  kVmmReadWrite = 3,
  kVmmLeastGranularity = 0,
};

// CUmemLocation
struct VmmLocation {
  int type;
  int id;
};
static_assert(sizeof(VmmLocation) == 8, "CUmemLocation of cuda.h");

// CUmemAllocationProp
struct VmmProperties {
  int type;
  int handle_types;
  VmmLocation location;
  void* of_windows;
  unsigned char compression, gpu_direct_rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(VmmProperties) == 32, "CUmemAllocationProp of cuda.h");

// CUmemAccessDesc
struct VmmAccess {
  VmmLocation location;
  int flags;
};
static_assert(sizeof(VmmAccess) == 12, "CUmemAccessDesc of cuda.h");

// CUuuid
struct GpuUuid {
  unsigned char bytes[16];
};
static_assert(sizeof(GpuUuid) == 16, "CUuuid of cuda.h");

#define JITKERN_VMM_SYMBOLS(USE)                                                                   \
  USE(cuDeviceGetUuid_v2, (GpuUuid * uuid, CUdevice device))                                       \
  USE(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice other))                          \
  USE(cuMemGetAllocationGranularity, (size_t* bytes, const VmmProperties* properties, int option)) \
  USE(cuMemCreate,                                                                                 \
      (CUmemHandle * handle, size_t bytes, const VmmProperties* properties, u64 flags))            \
  USE(cuMemRelease, (CUmemHandle handle))                                                          \
  USE(cuMemExportToShareableHandle, (void* shared, CUmemHandle handle, int type, u64 flags))       \
  USE(cuMemImportFromShareableHandle, (CUmemHandle * handle, void* shared, int type))              \
  USE(cuMemAddressReserve,                                                                         \
      (CUdeviceptr * pointer, size_t bytes, size_t alignment, CUdeviceptr wanted, u64 flags))      \
  USE(cuMemAddressFree, (CUdeviceptr pointer, size_t bytes))                                       \
  USE(cuMemMap, (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle, u64 flags)) \
  USE(cuMemUnmap, (CUdeviceptr pointer, size_t bytes))                                             \
  USE(cuMemSetAccess, (CUdeviceptr pointer, size_t bytes, const VmmAccess* access, size_t count))

struct Vmm {
#define JITKERN_DECLARE(name, parameters) CUresult(*name) parameters;
  JITKERN_VMM_SYMBOLS(JITKERN_DECLARE)
#undef JITKERN_DECLARE

  // RuntimeError where there is no driver, or one without them.
  static const Vmm& get();
};

// What memory on this GPU is made of that goes to another process, or stays in this one.
VmmProperties vmm_properties(int ordinal, bool is_exported);

}  // namespace jitkern
