// DeviceModule.launch: Python arguments become the bytes of a kernel's Params, checked against what
// the kernel takes, and off it goes.
#include <jitkern/launch.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::TypeIndex;

constexpr const char* kOp = "launch";
constexpr i64 kMaxParamsBytes = 32764;  // the driver's limit; 4,096 before CUDA 12.1
// Sizes that no GPU exceeds.
constexpr i64 kMaxGrid[] = {(i64(1) << 31) - 1, 65535, 65535};
constexpr i64 kMaxBlock[] = {1024, 1024, 64};
constexpr i64 kMaxCluster[] = {16, 16, 16};
constexpr i64 kMaxSharedBytes = 1 << 30;

std::string arg_name(int position) { return "args[" + std::to_string(position) + "]"; }
std::string device_name(int ordinal) { return "cuda:" + std::to_string(ordinal); }

// The bytes of a C struct whose members are the arguments, in order, and the device that its
// tensors are on.
struct Packed {
  i64 size = 0;
  int device = -1;  // -1: no tensor says it
  alignas(16) char bytes[kMaxParamsBytes + 16];

  explicit Packed(PackedArgs args) {
    for (int i = 0; i < args.size(); ++i) put(i, args[i]);
    pad_to(alignment_);
  }

 private:
  void put(int position, AnyView value) {
    const int type = value.type_index();
    if (type == TypeIndex::kTVMFFIInt) return put_value(value.cast<int64_t>());
    if (type == TypeIndex::kTVMFFIFloat) return put_value(value.cast<double>());
    if (type == TypeIndex::kTVMFFIBool) return put_value(value.cast<bool>());
    if (type == TypeIndex::kTVMFFIOpaquePtr) return put_value(value.cast<void*>());
    if (type == TypeIndex::kTVMFFIDLTensorPtr || type == TypeIndex::kTVMFFITensor) {
      const DLTensor& dl = *value.cast<DLTensor*>();
      const int there = dl.device.device_id;
      if (dl.device.device_type != kDLCUDA || (device != -1 && there != device)) {
        const std::string name = arg_name(position);
        const Tensor tensor(kOp, name.c_str(), value);
        tensor.value_error(
            "device " + tensor.device_name(),
            device == -1 ? "a CUDA device" : device_name(device) + ", as the others");
      }
      device = there;
      return put_value(static_cast<char*>(dl.data) + dl.byte_offset);
    }
    // A ctypes value: its alignment, then its bytes.
    const auto packed = value.try_cast<Bytes>();
    if (!packed.has_value()) {
      raise_type_error(kOp, arg_name(position).c_str(), value,
                       type == TypeIndex::kTVMFFIBigInt
                           ? "an int of 64 bits, or a ctypes value"
                           : "a tensor, int, float, bool or a ctypes value");
    }
    put_bytes(packed->data() + 1, packed->size() - 1, packed->data()[0]);
  }

  template <class T>
  void put_value(T value) {
    put_bytes(&value, sizeof(T), alignof(T));
  }

  void put_bytes(const void* from, i64 count, int alignment) {
    pad_to(alignment);
    if (size + count > kMaxParamsBytes) {
      raise_value_error(kOp, "args", "more than " + std::to_string(kMaxParamsBytes) + " bytes",
                        "what the driver takes");
    }
    std::memcpy(bytes + size, from, static_cast<size_t>(count));
    size += count;
    alignment_ = std::max(alignment_, alignment);
  }

  void pad_to(int alignment) {
    while (size % alignment != 0) bytes[size++] = 0;
  }

  int alignment_ = 1;
};

// One to three sizes, an int or a sequence of them, at most `limits`.
void take_sizes(const char* arg, AnyView value, const i64 (&limits)[3], unsigned (&sizes)[3]) {
  const auto items = value.try_cast<Array<Any>>();
  const int count = items.has_value() ? static_cast<int>(items->size()) : 1;
  if (count < 1 || count > 3) {
    raise_value_error(kOp, arg, std::to_string(count) + " sizes", "one to three");
  }
  for (int d = 0; d < count; ++d) {
    const i64 size = int_arg(kOp, arg, items.has_value() ? AnyView((*items)[d]) : value);
    if (size < 1 || size > limits[d]) {
      raise_value_error(kOp, arg, std::to_string(size) + " in dimension " + std::to_string(d),
                        "1 to " + std::to_string(limits[d]));
    }
    sizes[d] = static_cast<unsigned>(size);
  }
}

// The options of launch() as far as they need no GPU to be checked.
Launch checked_launch(const AnyView* options) {
  Launch launch;
  LaunchConfig& config = launch.config;
  take_sizes("grid", options[1], kMaxGrid, config.grid);
  take_sizes("block", options[2], kMaxBlock, config.block);
  const i64 shared_bytes = int_arg(kOp, "shared_bytes", options[3]);
  if (shared_bytes < 0 || shared_bytes > kMaxSharedBytes) {
    raise_value_error(kOp, "shared_bytes", std::to_string(shared_bytes), "0 or more");
  }
  config.shared_bytes = static_cast<unsigned>(shared_bytes);
  if (bool_arg(kOp, "cooperative", options[5])) launch.add(kLaunchCooperative, 1);
  if (is_none(options[6])) return launch;
  unsigned cluster[3] = {1, 1, 1};
  take_sizes("cluster", options[6], kMaxCluster, cluster);
  for (int d = 0; d < 3; ++d) {
    if (config.grid[d] % cluster[d] == 0) continue;
    raise_value_error(kOp, "cluster",
                      std::to_string(cluster[d]) + " in dimension " + std::to_string(d),
                      "a divisor of the grid's " + std::to_string(config.grid[d]));
  }
  launch.add(kLaunchClusterDimension, cluster[0], cluster[1], cluster[2]);
  return launch;
}

// Checks arguments and sizes against the loaded kernel and its GPU.
void check_launch(const Device& device, const Kernel& kernel, PackedArgs args, const Packed& params,
                  const LaunchConfig& config, bool has_cluster) {
  for (int i = 0; i < args.size(); ++i) {  // pointers that only the driver knows
    if (args[i].type_index() != TypeIndex::kTVMFFIOpaquePtr) continue;
    const void* pointer = args[i].cast<void*>();
    if (pointer == nullptr) continue;
    const MemoryRange range = memory_range(pointer);
    const bool on_gpu = range.type == kMemoryTypeDevice;
    if (on_gpu ? range.ordinal == device.ordinal : range.type == kMemoryTypeHost) continue;
    raise_value_error(
        kOp, arg_name(i).c_str(),
        on_gpu ? "memory of " + device_name(range.ordinal) : "memory that no GPU can read",
        "memory of " + device_name(device.ordinal));
  }
  // An empty struct has one byte.
  if (kernel.params_bytes != -1 && kernel.params_bytes != std::max(params.size, i64(1))) {
    raise_value_error(
        kOp, "args",
        std::to_string(args.size()) + " of " + std::to_string(params.size) + " bytes in all",
        std::to_string(kernel.params_bytes) + " bytes, the members of the kernel's Params");
  }
  const unsigned threads = config.block[0] * config.block[1] * config.block[2];
  if (threads > kernel.max_threads) {
    raise_value_error(kOp, "block", std::to_string(threads) + " threads",
                      "at most " + std::to_string(kernel.max_threads) + " for this kernel");
  }
  const i64 most = device.max_shared_bytes - kernel.own_shared_bytes;
  if (config.shared_bytes > most) {
    raise_value_error(kOp, "shared_bytes", std::to_string(config.shared_bytes),
                      "at most " + std::to_string(most) + " on this GPU");
  }
  if (has_cluster && device.arch < 90) {
    raise_value_error(kOp, "cluster", "given", "None on a GPU before compute capability 9.0");
  }
}

// launch(export, grid, block, shared_bytes, use_pdl, cooperative, cluster, device, stream, *args)
//
// A device of -1 is that of the tensors, on torch's current stream if `stream` is 1: a tensor of
// torch among the arguments has told it on its way here. Else nothing was launched: the device, or
// -1 for torch's current one, is returned, and wants to be given together with a stream.
constexpr int kNumOptions = 9;

void launch_user(KernelTable& table, PackedArgs all, Any* result) {
  Launch launch = checked_launch(all.data());
  const bool use_pdl = bool_arg(kOp, "use_pdl", all[4]);
  const PackedArgs args = all.Slice(kNumOptions);
  const Packed params(args);
  int ordinal = static_cast<int>(all[7].cast<int64_t>());
  void* stream = reinterpret_cast<void*>(all[8].cast<int64_t>());
  if (ordinal == -1) {
    ordinal = params.device;
    if (stream == nullptr) return static_cast<void>(*result = ordinal);
    stream = TVMFFIEnvGetStream(kDLCUDA, ordinal);
  }
  Device& device = Device::get(ordinal);
  check_pending_fault(device);
  const ContextScope scope(device);
  const Kernel& kernel = table.find(device, {}).entries.at(all[0].cast<int64_t>());
  check_launch(device, kernel, args, params, launch.config, !is_none(all[6]));
  if (use_pdl && device.knows_pdl) launch.add(kLaunchProgrammaticStreamSerialization, 1);
  launch.run(kernel.function, static_cast<CUstream>(stream), params.bytes);
}

// A function as above for the kernels of one module, of which resolve(...) returns the image.
Function make_launch(Function resolve) {
  auto table = std::make_shared<KernelTable>(kOp, std::vector<const char*>(), nullptr, resolve);
  return Function::FromPacked(
      [table](PackedArgs args, Any* result) { launch_user(*table, args, result); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_launch, make_launch);

}  // namespace jitkern
