// The CUDA driver without a CUDA toolkit: its functions are declared here and resolved from libcuda
// at first use. This builds without CUDA headers and loads without a GPU.
#pragma once

#include <jitkern/types.h>

#include <cstddef>

namespace jitkern {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = u64;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmemHandle = u64;  // CUmemGenericAllocationHandle

// Values of cuda.h that are part of the driver's stable ABI.
constexpr int kCudaSuccess = 0, kCudaErrorOutOfMemory = 2, kCudaErrorNotReady = 600;
constexpr int kAttributeMaxPitch = 11, kAttributeMultiprocessorCount = 16;
constexpr int kAttributeComputeMajor = 75, kAttributeComputeMinor = 76;
constexpr int kAttributeMaxSharedBytesPerBlockOptin = 97;
constexpr int kAttributeKnowsVmm = 102;    // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr int kAttributeExportsFds = 103;  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
constexpr int kFunctionMaxThreadsPerBlock = 0, kFunctionSharedBytes = 1;
constexpr int kFunctionMaxDynamicSharedBytes = 8, kFunctionNonPortableClusterSize = 14;
constexpr int kPointerMemoryType = 2, kPointerDevicePointer = 3, kPointerDeviceOrdinal = 9;
constexpr int kPointerRangeStart = 11, kPointerRangeSize = 12;
constexpr int kMemoryTypeHost = 1, kMemoryTypeDevice = 2, kMemoryTypeUnified = 4;
constexpr int kHostAllocPortable = 1, kHostAllocDeviceMap = 2;
constexpr int kCaptureModeRelaxed = 2, kSrcAccessOrderStream = 1;
constexpr int kStreamNonBlocking = 1, kEventDisableTiming = 2;
constexpr int kHighestStreamPriority = -5;  // the driver clamps it
constexpr int kJitErrorLogBuffer = 5, kJitErrorLogBufferBytes = 6;
constexpr int kLaunchCooperative = 2, kLaunchClusterDimension = 4;
constexpr int kLaunchProgrammaticStreamSerialization = 6;
constexpr int kWaitAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ, of differences modulo 2^32
constexpr int kVmmPinned = 1, kVmmOnDevice = 1, kVmmAsFd = 1, kVmmReadWrite = 3;

// CUlaunchAttribute: an id, padding to 8 bytes and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    unsigned sizes[3];  // a flag is the first
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute of cuda.h");

// CUDA_MEMCPY2D.
struct PitchedMemory {
  size_t x_bytes, y;
  int type;
  void* host;
  CUdeviceptr device;
  void* array;
  size_t pitch;
};
struct PitchedCopy {
  PitchedMemory src, dst;
  size_t width, height;
};
static_assert(sizeof(PitchedCopy) == 128, "CUDA_MEMCPY2D of cuda.h");

// CUmemcpyAttributes; the hints are for managed memory.
struct CopyAttributes {
  int src_access_order;
  int src_hint[2], dst_hint[2];
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24, "CUmemcpyAttributes of cuda.h");

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig of cuda.h");

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc.
struct VmmLocation {
  int type;
  int id;
};
struct VmmProperties {
  int type;
  int handle_types;
  VmmLocation location;
  void* win32_handle_metadata;
  unsigned char others[8];
};
static_assert(sizeof(VmmProperties) == 32, "CUmemAllocationProp of cuda.h");
struct VmmAccess {
  VmmLocation location;
  int flags;
};
static_assert(sizeof(VmmAccess) == 12, "CUmemAccessDesc of cuda.h");

// Required: every driver for CUDA 11.8 or newer has these functions.
#define JITKERN_DRIVER_SYMBOLS(USE)                                                                \
  USE(cuInit, (unsigned flags))                                                                    \
  USE(cuDriverGetVersion, (int* version))                                                          \
  USE(cuDeviceGetCount, (int* count))                                                              \
  USE(cuDeviceGet, (CUdevice * device, int ordinal))                                               \
  USE(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                          \
  USE(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                            \
  USE(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* active))                 \
  USE(cuCtxSynchronize, ())                                                                        \
  USE(cuCtxGetCurrent, (CUcontext * context))                                                      \
  USE(cuCtxSetCurrent, (CUcontext context))                                                        \
  USE(cuModuleLoadDataEx,                                                                          \
      (CUmodule * module, const void* image, unsigned num_options, int* options, void** values))   \
  USE(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))             \
  USE(cuModuleGetGlobal_v2,                                                                        \
      (CUdeviceptr * pointer, size_t* bytes, CUmodule module, const char* name))                   \
  USE(cuFuncGetAttribute, (int* value, int attribute, CUfunction function))                        \
  USE(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                         \
  USE(cuLaunchKernelEx,                                                                            \
      (const LaunchConfig* config, CUfunction function, void** parameters, void** extra))          \
  USE(cuMemsetD8Async, (CUdeviceptr pointer, unsigned char value, size_t bytes, CUstream stream))  \
  USE(cuMemcpyHtoDAsync_v2, (CUdeviceptr device, const void* host, size_t bytes, CUstream stream)) \
  USE(cuMemcpyDtoHAsync_v2, (void* host, CUdeviceptr device, size_t bytes, CUstream stream))       \
  USE(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))            \
  USE(cuMemcpy2DAsync_v2, (const PitchedCopy* copy, CUstream stream))                              \
  USE(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority))               \
  USE(cuStreamIsCapturing, (CUstream stream, int* status))                                         \
  USE(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                         \
  USE(cuEventCreate, (CUevent * event, unsigned flags))                                            \
  USE(cuEventRecord, (CUevent event, CUstream stream))                                             \
  USE(cuEventQuery, (CUevent event))                                                               \
  USE(cuEventElapsedTime, (float* ms, CUevent from, CUevent to))                                   \
  USE(cuEventDestroy_v2, (CUevent event))                                                          \
  USE(cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                              \
  USE(cuMemHostRegister_v2, (void* pointer, size_t bytes, unsigned flags))                         \
  USE(cuMemHostUnregister, (void* pointer))                                                        \
  USE(cuMemHostGetDevicePointer_v2, (CUdeviceptr * device_pointer, void* pointer, unsigned flags)) \
  USE(cuPointerGetAttributes,                                                                      \
      (unsigned count, int* attributes, void** values, CUdeviceptr pointer))                       \
  USE(cuThreadExchangeStreamCaptureMode, (int* mode))                                              \
  USE(cuGetErrorName, (CUresult error, const char** text))                                         \
  USE(cuGetErrorString, (CUresult error, const char** text))

// Optional, may be null: virtual memory, and newer functions.
#define JITKERN_MORE_DRIVER_SYMBOLS(USE)                                                           \
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
  USE(cuMemSetAccess, (CUdeviceptr pointer, size_t bytes, const VmmAccess* access, size_t count))  \
  USE(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, u32 value, unsigned flags))        \
  USE(cuFuncGetParamInfo, (CUfunction function, size_t number, size_t* offset, size_t* bytes))     \
  USE(cuMemcpyBatchAsync, (CUdeviceptr * dst, CUdeviceptr * src, size_t* bytes, size_t count,      \
                           CopyAttributes* attributes, size_t* first_of_each,                      \
                           size_t num_attributes, size_t* failed, CUstream stream))

struct Driver {
#define JITKERN_DECLARE(name, parameters) CUresult(*name) parameters;
  JITKERN_DRIVER_SYMBOLS(JITKERN_DECLARE)
  JITKERN_MORE_DRIVER_SYMBOLS(JITKERN_DECLARE)
#undef JITKERN_DECLARE
  // The loaded driver, after cuInit. RuntimeError with the cure if there is none.
  static const Driver& get();

  // RuntimeError naming `what` unless `result` is success.
  void check(CUresult result, const char* what) const;
};

// Calls a function of the driver. RuntimeError naming it if it fails.
#define JITKERN_CU(name, ...) \
  ::jitkern::Driver::get().check(::jitkern::Driver::get().name(__VA_ARGS__), #name)

// Whether a graph is being captured on the stream; the default stream cannot be captured.
inline bool is_capturing(CUstream stream) {
  int status = 0;
  if (stream != nullptr) JITKERN_CU(cuStreamIsCapturing, stream, &status);
  return status != 0;
}

}  // namespace jitkern
