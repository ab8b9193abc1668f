// The CUDA driver without a CUDA toolkit: the few entry points that are used, declared here and
// resolved from libcuda at first use. Building this needs no header of CUDA, loading it no GPU.
#pragma once

#include <jitkern/types.h>

#include <cstddef>
#include <string>

namespace jitkern {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = u64;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

// Values of cuda.h that are part of the driver's stable ABI.
enum : int {
  kCudaSuccess = 0,
  kAttributeMultiprocessorCount = 16,
  kAttributeComputeMajor = 75,
  kAttributeComputeMinor = 76,
  kAttributeMaxSharedBytesPerBlockOptin = 97,
  kFunctionMaxThreadsPerBlock = 0,
  kFunctionSharedBytes = 1,
  kFunctionMaxDynamicSharedBytes = 8,
  kFunctionNonPortableClusterSize = 14,
  kPointerMemoryType = 2,
  kPointerDevicePointer = 3,
  kPointerDeviceOrdinal = 9,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kMemoryTypeHost = 1,
  kMemoryTypeDevice = 2,
  kHostAllocPortable = 1,
  kHostAllocDeviceMap = 2,
  kCaptureModeRelaxed = 2,
  kJitErrorLogBuffer = 5,
  kJitErrorLogBufferBytes = 6,
  kLaunchCooperative = 2,
  kLaunchClusterDimension = 4,
  kLaunchProgrammaticStreamSerialization = 6,
};

// CUlaunchAttribute: an id, padding to 8 bytes and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    unsigned sizes[3];  // or a flag, the first
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute of cuda.h");

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig of cuda.h");

// What is used of the driver.
#define JITKERN_DRIVER_SYMBOLS(USE)                                                                \
  USE(cuInit, (unsigned flags))                                                                    \
  USE(cuDriverGetVersion, (int* version))                                                          \
  USE(cuDeviceGetCount, (int* count))                                                              \
  USE(cuDeviceGet, (CUdevice * device, int ordinal))                                               \
  USE(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                          \
  USE(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                            \
  USE(cuCtxGetCurrent, (CUcontext * context))                                                      \
  USE(cuCtxSetCurrent, (CUcontext context))                                                        \
  USE(cuModuleLoadDataEx,                                                                          \
      (CUmodule * module, const void* image, unsigned num_options, int* options, void** values))   \
  USE(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))             \
  USE(cuFuncGetAttribute, (int* value, int attribute, CUfunction function))                        \
  USE(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                         \
  USE(cuLaunchKernelEx,                                                                            \
      (const LaunchConfig* config, CUfunction function, void** parameters, void** extra))          \
  USE(cuMemsetD8Async, (CUdeviceptr pointer, unsigned char value, size_t bytes, CUstream stream))  \
  USE(cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                              \
  USE(cuMemHostGetDevicePointer_v2, (CUdeviceptr * device_pointer, void* pointer, unsigned flags)) \
  USE(cuPointerGetAttributes,                                                                      \
      (unsigned count, int* attributes, void** values, CUdeviceptr pointer))                       \
  USE(cuThreadExchangeStreamCaptureMode, (int* mode))                                              \
  USE(cuGetErrorName, (CUresult error, const char** text))                                         \
  USE(cuGetErrorString, (CUresult error, const char** text))

struct Driver {
#define JITKERN_DECLARE(name, parameters) CUresult(*name) parameters;
  JITKERN_DRIVER_SYMBOLS(JITKERN_DECLARE)
#undef JITKERN_DECLARE
  // From 12.4 on; null in an older driver.
  CUresult (*cuFuncGetParamInfo)(CUfunction function, size_t number, size_t* offset, size_t* bytes);

  // The loaded driver, after cuInit. RuntimeError with the cure where there is none.
  static const Driver& get();
  // The same, but null where there is no usable driver.
  static const Driver* get_or_null();

  // RuntimeError naming `what` unless `result` is success.
  void check(CUresult result, const char* what) const;
};

// 10 * major + minor of a device's compute capability; makes no context on it.
int arch_of(int ordinal);

// The devices of one process, 0 to kMaxDevices - 1.
constexpr int kMaxDevices = 64;

[[noreturn]] void raise_runtime_error(const std::string& message);

// One GPU: its primary context (the one that torch uses), and what launches need to know of it.
struct Device {
  int ordinal;
  CUcontext context;
  int arch;  // as of arch_of()
  int num_sms;
  int max_shared_bytes;       // that a block may ask for
  bool knows_pdl;             // the GPU and the driver have programmatic dependent launch
  FaultRecord* fault;         // pinned host memory
  FaultRecord* fault_device;  // the same memory as kernels see it

  // Made at first use of the device, also while a stream is being captured.
  static Device& get(int ordinal);
  // Null where the device has not been used yet.
  static Device* find(int ordinal);
};

// Makes the device's primary context current for the calling thread, as a launch needs it.
class ContextScope {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  CUcontext previous_;
  bool changed_;
};

// What the driver knows of an address.
struct MemoryRange {
  u32 type;  // kMemoryTypeHost: pinned, kMemoryTypeDevice, or 0: CUDA has never seen it
  int ordinal;
  const char* device_address;
  const char* begin;
  i64 bytes;
};
MemoryRange memory_range(const void* address);

// Lets this thread load code and allocate while another or the same thread captures a stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_;
};

}  // namespace jitkern
