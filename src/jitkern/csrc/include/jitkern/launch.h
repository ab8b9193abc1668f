// From an op's specialisation to a launch on the current torch stream.
#pragma once

#include <jitkern/check.h>
#include <jitkern/driver.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/string.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <vector>

namespace jitkern {

constexpr int kMaxSpec = 6;
constexpr int kMaxEntries = 2;

// The template arguments that a call's shapes and alignment ask for, in the order of the op's
// Python `kernel(*spec)`.
struct Spec {
  std::array<i64, kMaxSpec> values{};
  int size = 0;

  Spec(std::initializer_list<i64> list) {
    for (const i64 value : list) values[size++] = value;
  }
  bool operator==(const Spec& other) const { return values == other.values; }
};

struct Kernel {
  CUfunction function;
  unsigned num_threads;  // its launch bound
};

// Kernel `name` of `image` on `device`, also while a stream is being captured.
CUfunction load_function(const Device& device, const tvm::ffi::Bytes& image, const char* name);

// The kernels of one op: for each specialisation and device its entry points, loaded at first use
// with an image that Python's `resolve(op, spec, arch)` returns.
class KernelTable {
 public:
  KernelTable(const char* op, std::initializer_list<const char*> entries)
      : op_(op), entries_(entries) {}

  // The entry points of `spec` on `device`. Lock-free once loaded: a walk over a short list.
  const Kernel* find(const Device& device, const Spec& spec) {
    const Node* node = heads_[device.ordinal].load(std::memory_order_acquire);
    for (; node != nullptr; node = node->next) {
      if (node->spec == spec) return node->kernels.data();
    }
    return load(device, spec);
  }

 private:
  struct Node {
    Spec spec;
    std::array<Kernel, kMaxEntries> kernels;
    Node* next;
  };

  const Kernel* load(const Device& device, const Spec& spec);

  const char* op_;
  std::vector<const char*> entries_;
  std::array<std::atomic<Node*>, 64> heads_{};
};

// Raises, or warns of, a fault that an earlier kernel recorded on this device.
void raise_pending_fault(Device& device);

inline void check_pending_fault(Device& device) {
  if (*const_cast<volatile u32*>(&device.fault->state) == 2) raise_pending_fault(device);
}

// What a launch on a tensor's device needs: its context made current and torch's current stream.
class LaunchScope {
 public:
  explicit LaunchScope(const Tensor& tensor)
      : device(Device::get(tensor.dl->device.device_id)),
        context_(device),
        stream_(static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device.ordinal))) {
    check_pending_fault(device);
  }

  template <class Params>
  void launch(const Kernel& kernel, i64 grid_x, int grid_y, int block_x, const Params& params,
              bool use_pdl = false) const {
    void* arguments[] = {const_cast<Params*>(&params)};
    launch_with(kernel, grid_x, grid_y, block_x, arguments, use_pdl);
  }

  // Sets device memory on the stream.
  void fill_bytes(void* pointer, unsigned char value, i64 bytes) const;

  Device& device;

 private:
  void launch_with(const Kernel& kernel, i64 grid_x, int grid_y, int block_x, void** arguments,
                   bool use_pdl) const;

  ContextScope context_;
  CUstream stream_;
};

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

}  // namespace jitkern
