// From an op's specialisation to a launch on the current torch stream.
#pragma once

#include <jitkern/check.h>
#include <jitkern/driver.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <array>
#include <atomic>
#include <string>
#include <vector>

namespace jitkern {

// The devices of one process, 0 to kMaxDevices - 1.
constexpr int kMaxDevices = 64;

// A GPU: its primary context, which torch uses, and the properties that launches need.
struct Device {
  int ordinal;
  CUcontext context;
  int arch;  // 10 * major + minor of its compute capability
  int num_sms;
  int max_shared_bytes;       // the most dynamic shared memory of a block
  i64 max_pitch;              // the largest pitch of a strided copy by the copy engine, in bytes
  bool knows_pdl;             // the GPU and the driver have programmatic dependent launch
  FaultRecord* fault;         // pinned host memory
  FaultRecord* fault_device;  // its address for kernels

  // Opened at first use, also while a stream is being captured.
  static Device& get(int ordinal);
  // Null if the device has not been used yet.
  static Device* find(int ordinal);
};

// The driver's handle of a device, and one of its attributes. Neither creates a context.
CUdevice device_handle(i64 ordinal);
int device_attribute(CUdevice handle, int attribute);

// Makes the device's primary context current for the calling thread.
class ContextScope {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  CUcontext previous_;
  const CUcontext own_;
};

// Lets this thread load code, allocate and query events while any thread captures a stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_;
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

constexpr int kMaxSpec = 7;

// The template arguments of a kernel, by the shapes and alignment of a call.
struct Spec {
  std::array<i64, kMaxSpec> values;

  template <class... Ints>
  Spec(Ints... ints) : values{static_cast<i64>(ints)...} {
    static_assert(sizeof...(ints) <= kMaxSpec, "raise kMaxSpec");
  }
  i64 operator[](int i) const { return values[i]; }
  bool operator==(const Spec& other) const { return values == other.values; }
};

// One entry point.
struct Kernel {
  CUfunction function;
  unsigned num_threads;  // threads per block; 0 if the caller chooses
  bool use_pdl;
  unsigned max_threads;  // the most threads per block
  int own_shared_bytes;  // static shared memory per block
  i64 params_bytes;      // size of its parameter; -1 if the driver is older than 12.4
};

// The kernels of one specialisation, loaded on one device.
struct LoadedKernels {
  Spec spec;
  const LoadedKernels* next;    // in the table's list for the device
  std::vector<Kernel> entries;  // in the order of the builder's device_wrappers
  GroupShape shape;             // how threads share rows, in a kernel that copies rows
  int in_flight;                // vectors per thread
};

// The kernels of an op, or of a user's module: entry points for each specialisation and device.
// They are loaded at first use from the result of Python's resolve(op, names, values, arch):
//   (image, names of the entry points, [num_threads, use_pdl] of each + [in_flight, splits])
// The last list is empty for a user's module: its image holds the threads of its kernels.
class KernelTable {
 public:
  using ShapeOf = GroupShape (*)(const Spec& spec, int in_flight, int splits);

  // `names` are the parameters of the op's Python `kernel(...)`, in the order of a Spec. `shape_of`
  // is null for a user's module. The default of `resolve` is set_resolver's.
  KernelTable(const char* op, std::vector<const char*> names, ShapeOf shape_of,
              tvm::ffi::Function resolve = nullptr)
      : op_(op), names_(std::move(names)), shape_of_(shape_of), resolve_(std::move(resolve)) {}

  // The kernels of `spec` on `device`. Once loaded, a lock-free search of a short list.
  const LoadedKernels& find(const Device& device, const Spec& spec) {
    const LoadedKernels* loaded = heads_[device.ordinal].load(std::memory_order_acquire);
    for (; loaded != nullptr; loaded = loaded->next) {
      if (loaded->spec == spec) return *loaded;
    }
    return load(device, spec);
  }

 private:
  const LoadedKernels& load(const Device& device, const Spec& spec);
  void take_config(LoadedKernels& kernels, const tvm::ffi::Array<int64_t>& config) const;

  const char* op_;
  std::vector<const char*> names_;
  ShapeOf shape_of_;
  tvm::ffi::Function resolve_;
  std::array<std::atomic<const LoadedKernels*>, kMaxDevices> heads_{};
};

// A number for an index argument of an op, which kernels put into faults. `raise` raises a fault;
// `outcome` completes its message.
using RaiseFault = void (*)(const char* op, const char* arg, i64 position, i64 value, i64 bound,
                            const char* note);
FaultSite fault_site(const char* op, const char* arg, RaiseFault raise = raise_index_error,
                     const char* outcome = "the row was not copied");

// Raises a fault that an earlier kernel recorded, or warns of it, unless another thread does.
void raise_pending_fault(Device& device);

inline bool has_pending_fault(const Device& device) {
  return __atomic_load_n(&device.fault->state, __ATOMIC_RELAXED) == 2;
}

inline void check_pending_fault(Device& device) {
  if (has_pending_fault(device)) raise_pending_fault(device);
}

// An empty record in pinned memory, and its address for kernels. It is never freed. The device's
// context must be current.
FaultRecord* make_fault_record(FaultRecord** on_device);

// Forgets the pending fault if it is this one.
void forget_fault(Device& device, const FaultRecord& fault);

// PyTorch's current stream of the calling thread, or the one of `tvm_ffi.use_raw_stream`.
CUstream current_stream(int ordinal);

// A launch; by default one block of one thread.
struct Launch {
  LaunchConfig config{{1, 1, 1}, {1, 1, 1}, 0, nullptr, nullptr, 0};
  LaunchAttribute attributes[3];

  void add(int attribute, unsigned x, unsigned y = 0, unsigned z = 0) {
    attributes[config.num_attributes++] = {attribute, 0, {{x, y, z}}};
  }
  // `params` is the kernel's one parameter. The device's context must be current.
  void run(CUfunction function, CUstream stream, const void* params);
};

// The state for launches on a device: its context, made current, and torch's current stream. The
// constructor raises the fault of an earlier call, so an op makes a scope before its first launch.
class LaunchScope {
 public:
  explicit LaunchScope(const Tensor& tensor) : LaunchScope(tensor.dl->device.device_id) {}
  explicit LaunchScope(int ordinal)
      : device(Device::get(ordinal)), context_(device), stream_(current_stream(ordinal)) {
    check_pending_fault(device);
  }

  // On another stream of the device; raises no fault.
  LaunchScope(Device& device, CUstream stream)
      : device(device), context_(device), stream_(stream) {}

  CUstream stream() const { return stream_; }

  template <class Params>
  void launch(const Kernel& kernel, i64 grid_x, const Params& params, int grid_y = 1,
              unsigned cluster = 1, i64 shared_bytes = 0) const {
    launch_bytes(kernel, grid_x, &params, sizeof(Params), kernel.num_threads, grid_y, cluster,
                 shared_bytes);
  }

  // The same with `num_threads` per block; the kernel takes the first `bytes` of `params`.
  void launch_bytes(const Kernel& kernel, i64 grid_x, const void* params, i64 bytes,
                    unsigned num_threads, int grid_y = 1, unsigned cluster = 1,
                    i64 shared_bytes = 0) const;

  // Lets a kernel have more than 48 KiB of dynamic shared memory.
  void allow_shared_bytes(const Kernel& kernel, i64 shared_bytes) const;

  // Sets device memory on the stream.
  void fill_bytes(void* pointer, unsigned char value, i64 bytes) const;

  Device& device;

 private:
  ContextScope context_;
  CUstream stream_;
};

// For a collective call, or one that consumes a push: the fault of an earlier op is raised after
// the last launch. Ranks see a fault at different calls. A rank that raised before its launch would
// stay one call behind the others, and a consumer one push behind its producer.
class CollectiveScope : public LaunchScope {
 public:
  explicit CollectiveScope(int ordinal)
      : LaunchScope(Device::get(ordinal), current_stream(ordinal)),
        has_fault_(has_pending_fault(device)) {}

  // Raises only a fault from before this call: of this call's own, only some ranks would know.
  void raise_earlier() const {
    if (has_fault_) check_pending_fault(device);
  }

 private:
  const bool has_fault_;
};

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// Launches the kernel of `spec` on `num_rows` rows of `grid_y` tables; nothing for an empty call.
template <class Params>
void launch_rows(KernelTable& table, const LaunchScope& scope, const Spec& spec, i64 num_rows,
                 Params& params, int grid_y = 1) {
  if (num_rows == 0 || spec[0] == 0) return;
  const LoadedKernels& kernels = table.find(scope.device, spec);
  params.fault = scope.device.fault_device;
  const Kernel& kernel = kernels.entries[0];
  scope.launch(kernel, ceil_div(kernels.shape.num_threads(num_rows), kernel.num_threads), params,
               grid_y);
}

// The shape for a specialisation that begins with (row_bytes, vec_bytes).
inline GroupShape row_shape(const Spec& spec, int in_flight, int splits) {
  return group_shape(spec[0], spec[1], in_flight, splits);
}

// The driver's CUDA version such as 13000, 0 without a driver.
int64_t driver_version();

// A tensor from torch's allocator.
tvm::ffi::Tensor allocate(tvm::ffi::ShapeView shape, DLDataType dtype, DLDevice device);

}  // namespace jitkern
