// DeviceModule.launch: packs Python arguments into the bytes of a user's Params, checks them
// against the kernel and its GPU, and launches. The types of the members come from jit/params.py;
// if it does not know them, they are the types of the arguments.
#include <jitkern/launch.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::String;
using tvm::ffi::Tuple;
using tvm::ffi::TypeIndex;

constexpr const char* kOp = "launch";
constexpr i64 kMaxParamsBytes = 32764;  // the driver's limit; 4,096 before CUDA 12.1
// Instead of a device's ordinal: there is no tensor, or all tensors are on the CPU.
constexpr int kNoDevice = -1;
constexpr int kOnCpu = -2;

std::string device_name(int ordinal) { return ordinal == kOnCpu ? "cpu" : str("cuda:", ordinal); }

// A member of Params.
struct Param {
  std::string name;
  std::string dtype_name;
  DLDataType dtype;  // void has 0 bits
  bool is_pointer;
  bool is_strided;

  i64 bytes() const { return is_pointer ? 8 : dtype.bits / 8; }
};

// A kernel's arguments, as far as Python knows them.
struct Signature {
  std::string kernel;
  bool has_cpu_form = false;
  std::vector<Param> params;  // empty if unknown

  // Messages name the kernel and its parameter if they are known, otherwise launch() and a number.
  const char* op() const { return params.empty() ? kOp : kernel.c_str(); }
  std::string arg(int i) const { return params.empty() ? str("args[", i, "]") : params[i].name; }
};

// The bytes of a C struct whose members are the arguments in order, and the device of its tensors.
struct Packed {
  i64 size = 0;
  int device = kNoDevice;
  alignas(16) char bytes[kMaxParamsBytes + 16];

  Packed(const Signature& signature, PackedArgs args) : signature_(signature) {
    const bool is_known = !signature.params.empty();
    if (is_known && args.size() != static_cast<int>(signature.params.size())) {
      wrong_count(args.size());
    }
    for (int i = 0; i < args.size(); ++i) is_known ? put_member(i, args[i]) : put(i, args[i]);
    pad_to(alignment_);
  }

 private:
  // Packs an argument by its own type: the member is unknown.
  void put(int i, AnyView value) {
    const int type = value.type_index();
    if (type == TypeIndex::kTVMFFIInt) return put_value(value.cast<int64_t>());
    if (type == TypeIndex::kTVMFFIFloat) return put_value(value.cast<double>());
    if (type == TypeIndex::kTVMFFIBool) return put_value(value.cast<bool>());
    if (is_tensor(type)) return put_tensor(i, value);
    // A ctypes value: its alignment, then its bytes.
    const auto packed = value.try_cast<Bytes>();
    if (!packed.has_value()) {
      raise_type_error(kOp, signature_.arg(i).c_str(), value,
                       "a tensor, an int of 64 bits, a float, a bool or a ctypes value");
    }
    put_bytes(packed->data() + 1, packed->size() - 1, packed->data()[0]);
  }

  static bool is_tensor(int type) {
    return type == TypeIndex::kTVMFFIDLTensorPtr || type == TypeIndex::kTVMFFITensor;
  }

  void put_tensor(int i, AnyView value) {
    const DLTensor& dl = *value.cast<DLTensor*>();
    const auto type = dl.device.device_type;
    const bool on_cpu = signature_.has_cpu_form && (type == kDLCPU || type == kDLCUDAHost);
    const int ordinal = type == kDLCUDA ? dl.device.device_id : kOnCpu;
    if ((type != kDLCUDA && !on_cpu) || (device != kNoDevice && ordinal != device)) {
      wrong_device(i, value);
    }
    device = ordinal;
    put_value(static_cast<char*>(dl.data) + dl.byte_offset);
  }

  [[noreturn]] void wrong_device(int i, AnyView value) const {
    const std::string name = signature_.arg(i);
    const Tensor tensor(signature_.op(), name.c_str(), value);
    const char* any = signature_.has_cpu_form
                          ? "cpu or cuda"
                          : "a CUDA device; for tensors on the CPU give load_jit "
                            "cpp_files and cpp_wrappers as well";
    tensor.value_error("device " + tensor.device_name(),
                       device == kNoDevice ? any : device_name(device) + ", as the others");
  }

  [[noreturn]] void wrong_count(int count) const {
    std::string names;
    for (const Param& param : signature_.params) names += (names.empty() ? "" : ", ") + param.name;
    raise_value_error(signature_.op(), "args", str(count, " arguments"),
                      str(signature_.params.size(), ": ", names));
  }

  // Packs an argument as the type of its member.
  void put_member(int i, AnyView value) {
    const Param& param = signature_.params[i];
    const int type = value.type_index();
    if (param.is_pointer && is_tensor(type)) {
      const Tensor tensor(signature_.op(), param.name.c_str(), value);
      const bool is_any = param.dtype.bits == 0;
      if (!is_any && tensor.dl->dtype != param.dtype) tensor.dtype_error(param.dtype_name);
      if (!param.is_strided) {
        tensor.contiguous(
            "; declare it as strided in device_wrappers, or pass .contiguous() if it is only read");
      }
      return put_tensor(i, value);
    }
    if (const auto packed = value.try_cast<Bytes>()) {  // a ctypes value, of a type of its own
      const i64 bytes = static_cast<i64>(packed->size()) - 1;
      if (bytes == param.bytes()) return put_bytes(packed->data() + 1, bytes, bytes);
      raise_value_error(signature_.op(), param.name.c_str(), str(bytes, " bytes"),
                        str(param.bytes(), ", those of ", expected(param)));
    }
    if (!is_number_for(param, type)) {
      raise_type_error(signature_.op(), param.name.c_str(), value, expected(param));
    }
    put_number(param, value);
  }

  static bool is_number_for(const Param& param, int type) {
    if (param.is_pointer) return false;
    if (param.dtype.code == kDLBool) return type == TypeIndex::kTVMFFIBool;
    return type == TypeIndex::kTVMFFIInt ||
           (type == TypeIndex::kTVMFFIFloat && param.dtype.code == kDLFloat);
  }

  static std::string expected(const Param& param) {
    if (!param.is_pointer) return param.dtype_name;
    return param.dtype.bits == 0 ? "a tensor" : "a tensor of " + param.dtype_name;
  }

  void put_number(const Param& param, AnyView value) {
    const DLDataType dtype = param.dtype;
    if (dtype.code == kDLBool) return put_value(value.cast<bool>());
    if (dtype.code == kDLFloat) {
      const double number = value.cast<double>();
      if (dtype.bits == 64) return put_value(number);
      const float rounded = static_cast<float>(number);
      if (std::isinf(rounded) && !std::isinf(number)) out_of_range(param, std::to_string(number));
      return put_value(rounded);
    }
    // The FFI's int has 64 bits; for a larger uint64 give a ctypes value.
    const i64 number = value.cast<int64_t>();
    const bool is_signed = dtype.code == kDLInt;
    // The sign and the bits above those of the type: all zeros, or all ones for a negative number.
    const i64 above = number >> std::min(dtype.bits - (is_signed ? 1 : 0), 63);
    if (above != 0 && !(is_signed && above == -1)) out_of_range(param, std::to_string(number));
    put_bytes(&number, dtype.bits / 8, dtype.bits / 8);  // little endian
  }

  [[noreturn]] void out_of_range(const Param& param, const std::string& number) const {
    raise_value_error(signature_.op(), param.name.c_str(), number,
                      "a number that " + param.dtype_name + " holds");
  }

  template <class T>
  void put_value(T value) {
    put_bytes(&value, sizeof(T), alignof(T));
  }

  void put_bytes(const void* from, i64 count, int alignment) {
    pad_to(alignment);
    if (size + count > kMaxParamsBytes) {
      raise_value_error(kOp, "args", str("more than ", kMaxParamsBytes, " bytes"),
                        "what the driver takes");
    }
    std::memcpy(bytes + size, from, static_cast<size_t>(count));
    size += count;
    alignment_ = std::max(alignment_, alignment);
  }

  void pad_to(int alignment) {
    while (size % alignment != 0) bytes[size++] = 0;
  }

  const Signature& signature_;
  int alignment_ = 1;
};

// -- options of launch() -------------------------------------------------------------------------

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
    raise_value_error(kOp, arg, str(count, " sizes"), "one to three");
  }
  for (int d = 0; d < count; ++d) {
    const i64 size = int_arg(kOp, arg, items.has_value() ? AnyView((*items)[d]) : value);
    if (size < 1 || size > limits[d]) {
      raise_value_error(kOp, arg, str(size, " in dimension ", d), str("1 to ", limits[d]));
    }
    sizes[d] = static_cast<unsigned>(size);
  }
}

// Reads the options of launch(), and checks what needs no GPU.
Launch checked_launch(const AnyView* options) {
  Launch launch;
  LaunchConfig& config = launch.config;
  take_sizes("grid", options[1], kMaxGrid, config.grid);
  config.block[0] = 0;  // the kernel's kNumThreads
  if (!is_none(options[2])) take_sizes("block", options[2], kMaxBlock, config.block);
  const i64 shared_bytes = int_arg(kOp, "shared_bytes", options[3]);
  if (shared_bytes < 0 || shared_bytes > kMaxSharedBytes) {
    raise_value_error(kOp, "shared_bytes", str(shared_bytes), "0 or more");
  }
  config.shared_bytes = static_cast<unsigned>(shared_bytes);
  if (bool_arg(kOp, "cooperative", options[5])) launch.add(kLaunchCooperative, 1);
  if (is_none(options[6])) return launch;
  unsigned cluster[3] = {1, 1, 1};
  take_sizes("cluster", options[6], kMaxCluster, cluster);
  for (int d = 0; d < 3; ++d) {
    if (config.grid[d] % cluster[d] == 0) continue;
    raise_value_error(kOp, "cluster", str(cluster[d], " in dimension ", d),
                      str("a divisor of the grid's ", config.grid[d]));
  }
  launch.add(kLaunchClusterDimension, cluster[0], cluster[1], cluster[2]);
  return launch;
}

// Checks arguments and sizes against the loaded kernel and its GPU; completes the sizes.
void check_launch(const Device& device, const Kernel& kernel, int num_args, const Packed& params,
                  LaunchConfig& config, bool has_cluster) {
  // An empty struct has one byte.
  if (kernel.params_bytes != -1 && kernel.params_bytes != std::max(params.size, i64(1))) {
    raise_value_error(kOp, "args", str(num_args, " of ", params.size, " bytes in all"),
                      str(kernel.params_bytes, " bytes, the members of the kernel's Params"));
  }
  if (config.block[0] == 0) config.block[0] = kernel.num_threads;
  const unsigned threads = config.block[0] * config.block[1] * config.block[2];
  if (threads == 0) {
    raise_value_error(kOp, "block", "None", "threads: the kernel's class has no kNumThreads");
  }
  if (kernel.num_threads != 0 && threads != kernel.num_threads) {
    raise_value_error(kOp, "block", str(threads, " threads"),
                      str(kernel.num_threads, ", the kernel's kNumThreads"));
  }
  if (threads > kernel.max_threads) {
    raise_value_error(kOp, "block", str(threads, " threads"),
                      str("at most ", kernel.max_threads, " for this kernel"));
  }
  const i64 most = device.max_shared_bytes - kernel.own_shared_bytes;
  if (config.shared_bytes > most) {
    raise_value_error(kOp, "shared_bytes", str(config.shared_bytes),
                      str("at most ", most, " on this GPU"));
  }
  if (has_cluster && device.arch < 90) {
    raise_value_error(kOp, "cluster", "given", "None on a GPU before compute capability 9.0");
  }
}

// launch(export, grid, block, shared_bytes, use_pdl, cooperative, cluster, device, stream, *args)
//
// If `device` is kNoDevice, the tensors' device is used. Then `stream` is 1 if one is a tensor of
// torch, from which the FFI has set torch's current stream. Otherwise nothing is launched, and the
// device is returned for a second call with a stream (kNoDevice: torch's current device). If the
// tensors are on the CPU, everything is checked, nothing is launched, and kOnCpu is returned.
constexpr int kNumOptions = 9;

void launch_user(KernelTable& table, const std::vector<Signature>& signatures, PackedArgs all,
                 Any* result) {
  Launch launch = checked_launch(all.data());
  const bool use_pdl = bool_arg(kOp, "use_pdl", all[4]);
  const PackedArgs args = all.Slice(kNumOptions);
  const size_t number = static_cast<size_t>(all[0].cast<int64_t>());
  const Signature& signature = signatures.at(number);
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
  check_launch(device, kernel, args.size(), params, launch.config, !is_none(all[6]));
  if (use_pdl && device.knows_pdl) launch.add(kLaunchProgrammaticStreamSerialization, 1);
  launch.run(kernel.function, static_cast<CUstream>(stream), params.bytes);
}

// (name, dtype's name, code and bits, is_pointer, is_strided)
using ParamTuple = Tuple<String, String, int64_t, int64_t, bool, bool>;
// (kernel, has_cpu_form, parameters)
using SignatureTuple = Tuple<String, bool, Array<ParamTuple>>;

// Returns launch_user for the kernels of one module; resolve(...) returns its image.
Function make_launch(Function resolve, Array<SignatureTuple> tuples) {
  std::vector<Signature> signatures;
  for (const auto& [kernel, has_cpu_form, params] : tuples) {
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
