// The CUDA driver without a CUDA toolkit: the few entry points that are used, declared here and
// resolved from libcuda at first use. Building this needs no header of CUDA, loading it no GPU.
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
  kPointerMemoryType = 2,
  kPointerDevicePointer = 3,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kMemoryTypeHost = 1,
  kHostAllocPortable = 1,
  kHostAllocDeviceMap = 2,
  kCaptureModeRelaxed = 2,
  kJitErrorLogBuffer = 5,
  kJitErrorLogBufferBytes = 6,
  kLaunchProgrammaticStreamSerialization = 6,
};

// CUlaunchAttribute: an id, padding to 8 bytes and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    int enabled;
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute of cuda.h");

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig of cuda.h");

struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxSetCurrent)(CUcontext context);
  CUresult (*cuModuleLoadDataEx)(CUmodule* module, const void* image, unsigned num_options,
                                 int* options, void** values);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncGetAttribute)(int* value, int attribute, CUfunction function);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuLaunchKernelEx)(const LaunchConfig* config, CUfunction function, void** parameters,
                               void** extra);
  CUresult (*cuMemsetD8Async)(CUdeviceptr pointer, unsigned char value, size_t bytes,
                              CUstream stream);
  CUresult (*cuMemHostAlloc)(void** pointer, size_t bytes, unsigned flags);
  CUresult (*cuMemHostGetDevicePointer)(CUdeviceptr* device_pointer, void* pointer, unsigned flags);
  CUresult (*cuPointerGetAttributes)(unsigned count, int* attributes, void** values,
                                     CUdeviceptr pointer);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuGetErrorName)(CUresult error, const char** text);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);

  // The loaded driver, after cuInit. RuntimeError with the cure where there is none.
  static const Driver& get();
  // The same, but null where there is no usable driver.
  static const Driver* get_or_null();

  // RuntimeError naming `what` unless `result` is success.
  void check(CUresult result, const char* what) const;
};

// One GPU: its primary context (the one that torch uses), and what launches need to know of it.
struct Device {
  int ordinal;
  CUcontext context;
  int arch;  // 10 * major + minor
  int num_sms;
  bool use_pdl;               // the GPU and the driver know programmatic dependent launch
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

// What the driver knows of a host address.
struct PinnedRange {
  const char* device_address;  // null if the memory is not pinned
  const char* begin;
  i64 bytes;
};
PinnedRange pinned_range(const void* host_address);

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
