// DeviceModule.launch: what user_params.h has made of the arguments is checked against the kernel
// and its GPU, and off it goes.
#include <dlfcn.h>
#include <jitkern/launch.h>
#include <tvm/ffi/container/tuple.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/user_params.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::String;
using tvm::ffi::Tuple;

// Sizes that no GPU exceeds.
constexpr i64 kMaxGrid[] = {(i64(1) << 31) - 1, 65535, 65535};
constexpr i64 kMaxBlock[] = {1024, 1024, 64};
constexpr i64 kMaxCluster[] = {16, 16, 16};
constexpr i64 kMaxSharedBytes = 1 << 30;

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
  config.block[0] = 0;  // the kernel's kNumThreads
  if (!is_none(options[2])) take_sizes("block", options[2], kMaxBlock, config.block);
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

// Whether this GPU may read and write memory that lies on another one: such as that of a
// PeerMemory, which the driver's virtual memory management has mapped for both. Of any other memory
// it knows nothing. A context is current.
bool may_access(const Device& device, const void* pointer) {
  struct Location {  // CUmemLocation
    int type;
    int id;
  };
  constexpr int kOnDevice = 1;
  constexpr unsigned long long kReadWrite = 3;
  using GetAccess = CUresult (*)(unsigned long long*, const Location*, CUdeviceptr);
  static const auto get_access = [] {  // from 10.2 on
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<GetAccess>(library == nullptr ? nullptr
                                                          : dlsym(library, "cuMemGetAccess"));
  }();
  if (get_access == nullptr) return false;
  const Location here{kOnDevice, device.ordinal};
  unsigned long long flags = 0;
  const CUresult result = get_access(&flags, &here, reinterpret_cast<CUdeviceptr>(pointer));
  return result == kCudaSuccess && flags == kReadWrite;
}

// Checks arguments and sizes against the loaded kernel and its GPU; completes the sizes.
void check_launch(const Device& device, const Kernel& kernel, const Signature& signature,
                  PackedArgs args, const Packed& params, LaunchConfig& config, bool has_cluster) {
  for (int i = 0; i < args.size(); ++i) {  // pointers that only the driver knows
    if (args[i].type_index() != TypeIndex::kTVMFFIOpaquePtr) continue;
    const void* pointer = args[i].cast<void*>();
    if (pointer == nullptr) continue;
    const MemoryRange range = memory_range(pointer);
    const bool on_gpu = range.type == kMemoryTypeDevice;
    if (on_gpu ? range.ordinal == device.ordinal : range.type == kMemoryTypeHost) continue;
    if (on_gpu && may_access(device, pointer)) continue;
    raise_value_error(
        signature.op(), signature.arg(i).c_str(),
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
  if (config.block[0] == 0) config.block[0] = kernel.num_threads;
  const unsigned threads = config.block[0] * config.block[1] * config.block[2];
  if (threads == 0) {
    raise_value_error(kOp, "block", "None", "threads: the kernel's class has no kNumThreads");
  }
  if (kernel.num_threads != 0 && threads != kernel.num_threads) {
    raise_value_error(kOp, "block", std::to_string(threads) + " threads",
                      std::to_string(kernel.num_threads) + ", the kernel's kNumThreads");
  }
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
// A device of kNoDevice is that of the tensors, on torch's current stream if `stream` is 1: a
// tensor of torch among the arguments has told it on its way here. Else nothing was launched: the
// device, or kNoDevice for torch's current one, is returned, and wants to be given together with a
// stream. Nor is anything launched for tensors on the CPU: kOnCpu is returned, and all has been
// checked.
constexpr int kNumOptions = 9;

void launch_user(KernelTable& table, const std::vector<Signature>& signatures, PackedArgs all,
                 Any* result) {
  static const Signature unknown;
  Launch launch = checked_launch(all.data());
  const bool use_pdl = bool_arg(kOp, "use_pdl", all[4]);
  const PackedArgs args = all.Slice(kNumOptions);
  const size_t number = static_cast<size_t>(all[0].cast<int64_t>());
  const Signature& signature = number < signatures.size() ? signatures[number] : unknown;
  const Packed params(signature, args);
  if (params.device == kOnCpu) return static_cast<void>(*result = kOnCpu);
  int ordinal = static_cast<int>(all[7].cast<int64_t>());
  void* stream = reinterpret_cast<void*>(all[8].cast<int64_t>());
  if (ordinal == kNoDevice) {
    ordinal = params.device;
    if (stream == nullptr) return static_cast<void>(*result = ordinal);
    stream = TVMFFIEnvGetStream(kDLCUDA, ordinal);
  }
  Device& device = Device::get(ordinal);
  check_pending_fault(device);
  const ContextScope scope(device);
  const Kernel& kernel = table.find(device, {}).entries.at(number);
  check_launch(device, kernel, signature, args, params, launch.config, !is_none(all[6]));
  if (use_pdl && device.knows_pdl) launch.add(kLaunchProgrammaticStreamSerialization, 1);
  launch.run(kernel.function, static_cast<CUstream>(stream), params.bytes);
}

// (name, its dtype's name, code and bits, whether it is a pointer, whether it may have strides)
using ParamTuple = Tuple<String, String, int64_t, int64_t, bool, bool>;
// (kernel, whether it has a form for the CPU, its parameters)
using SignatureTuple = Tuple<String, bool, Array<ParamTuple>>;

// A function as above for the kernels of one module, of which resolve(...) returns the image.
Function make_launch(Function resolve, Array<SignatureTuple> given) {
  std::vector<Signature> signatures;
  for (const auto& [kernel, has_cpu_form, params] : given) {
    Signature& signature = signatures.emplace_back(Signature{kernel, has_cpu_form, {}});
    for (const auto& [name, dtype_name, code, bits, is_pointer, is_strided] : params) {
      const DLDataType dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
      signature.params.push_back({name, dtype_name, dtype, is_pointer, is_strided});
    }
  }
  auto table = std::make_shared<KernelTable>(kOp, std::vector<const char*>(), nullptr, resolve);
  return Function::FromPacked(
      [table, signatures = std::move(signatures)](PackedArgs args, Any* result) {
        launch_user(*table, signatures, args, result);
      });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_launch, make_launch);

}  // namespace jitkern
