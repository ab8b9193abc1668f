// Python arguments become the bytes of a user's Params: as they come, or where its members are
// known (jit/params.py), as these want them.
#pragma once

#include <jitkern/check.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace jitkern {

using tvm::ffi::Bytes;
using tvm::ffi::PackedArgs;
using tvm::ffi::TypeIndex;

constexpr const char* kOp = "launch";
constexpr i64 kMaxParamsBytes = 32764;  // the driver's limit; 4,096 before CUDA 12.1
// Instead of a device's number: no tensor says it, and all tensors are on the CPU.
constexpr int kNoDevice = -1;
constexpr int kOnCpu = -2;

inline std::string device_name(int ordinal) {
  return ordinal == kOnCpu ? "cpu" : "cuda:" + std::to_string(ordinal);
}

// A member of Params.
struct Param {
  std::string name;
  std::string dtype_name;
  DLDataType dtype;  // of no bits: void
  bool is_pointer;
  bool is_strided;

  i64 bytes() const { return is_pointer ? 8 : dtype.bits / 8; }
};

// What is known of a kernel's arguments before there is a kernel.
struct Signature {
  std::string kernel;
  bool has_cpu_form = false;
  std::vector<Param> params;  // none: not known

  // A known argument is one of the kernel, any other of launch().
  const char* op() const { return params.empty() ? kOp : kernel.c_str(); }
  std::string arg(int i) const {
    return params.empty() ? "args[" + std::to_string(i) + "]" : params[i].name;
  }
};

// The bytes of a C struct whose members are the arguments, in order, and the device that its
// tensors are on.
struct Packed {
  i64 size = 0;
  int device = kNoDevice;
  alignas(16) char bytes[kMaxParamsBytes + 16];

  Packed(const Signature& signature, PackedArgs args) : signature_(signature) {
    const auto& params = signature.params;
    if (params.empty()) {
      for (int i = 0; i < args.size(); ++i) put(i, args[i]);
    } else {
      if (args.size() != static_cast<int>(params.size())) wrong_count(args.size());
      for (int i = 0; i < args.size(); ++i) put_member(i, args[i]);
    }
    pad_to(alignment_);
  }

 private:
  // -- as it comes --------------------------------------------------------------------------------

  void put(int i, AnyView value) {
    const int type = value.type_index();
    if (type == TypeIndex::kTVMFFIInt) return put_value(value.cast<int64_t>());
    if (type == TypeIndex::kTVMFFIFloat) return put_value(value.cast<double>());
    if (type == TypeIndex::kTVMFFIBool) return put_value(value.cast<bool>());
    if (type == TypeIndex::kTVMFFIOpaquePtr) return put_value(value.cast<void*>());
    if (is_tensor(type)) return put_tensor(i, value);
    // A ctypes value: its alignment, then its bytes.
    const auto packed = value.try_cast<Bytes>();
    if (!packed.has_value()) {
      raise_type_error(kOp, signature_.arg(i).c_str(), value,
                       type == TypeIndex::kTVMFFIBigInt
                           ? "an int of 64 bits, or a ctypes value"
                           : "a tensor, int, float, bool or a ctypes value");
    }
    put_bytes(packed->data() + 1, packed->size() - 1, packed->data()[0]);
  }

  static bool is_tensor(int type) {
    return type == TypeIndex::kTVMFFIDLTensorPtr || type == TypeIndex::kTVMFFITensor;
  }

  void put_tensor(int i, AnyView value) {
    const DLTensor& dl = *value.cast<DLTensor*>();
    const bool on_cuda = dl.device.device_type == kDLCUDA;
    const int there = on_cuda ? dl.device.device_id : kOnCpu;
    if ((!on_cuda && !runs_on(dl.device.device_type)) || (device != kNoDevice && there != device)) {
      wrong_device(i, value);
    }
    device = there;
    put_value(static_cast<char*>(dl.data) + dl.byte_offset);
  }

  bool runs_on(int device_type) const {
    return signature_.has_cpu_form && (device_type == kDLCPU || device_type == kDLCUDAHost);
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

  // -- as the member wants it ---------------------------------------------------------------------

  [[noreturn]] void wrong_count(int count) const {
    std::string names;
    for (const Param& param : signature_.params) names += (names.empty() ? "" : ", ") + param.name;
    raise_value_error(signature_.op(), "args", std::to_string(count) + " arguments",
                      std::to_string(signature_.params.size()) + ": " + names);
  }

  void put_member(int i, AnyView value) {
    const Param& param = signature_.params[i];
    const int type = value.type_index();
    if (param.is_pointer && is_tensor(type)) {
      check_tensor(param, value);
      return put_tensor(i, value);
    }
    if (param.is_pointer && type == TypeIndex::kTVMFFIOpaquePtr) {
      return put_value(value.cast<void*>());
    }
    // A ctypes value says its type itself.
    if (type == TypeIndex::kTVMFFIBytes || type == TypeIndex::kTVMFFISmallBytes) {
      const auto packed = value.cast<Bytes>();
      const i64 bytes = static_cast<i64>(packed.size()) - 1;
      if (bytes == param.bytes()) return put_bytes(packed.data() + 1, bytes, bytes);
      raise_value_error(signature_.op(), param.name.c_str(), std::to_string(bytes) + " bytes",
                        std::to_string(param.bytes()) + ", those of " + expected(param));
    }
    if (!param.is_pointer && put_scalar(param, type, value)) return;
    raise_type_error(signature_.op(), param.name.c_str(), value, expected(param));
  }

  static std::string expected(const Param& param) {
    if (!param.is_pointer) return param.dtype_name;
    return param.dtype.bits == 0 ? "a tensor" : "a tensor of " + param.dtype_name;
  }

  void check_tensor(const Param& param, AnyView value) const {
    const Tensor tensor(signature_.op(), param.name.c_str(), value);
    const DLDataType is = tensor.dl->dtype;
    const DLDataType want = param.dtype;
    if (want.bits != 0 && (is.code != want.code || is.bits != want.bits || is.lanes != 1)) {
      tensor.type_error("dtype " + tensor.dtype_name(), param.dtype_name);
    }
    if (!param.is_strided)
      tensor.contiguous("call .contiguous(), or declare it as strided in device_wrappers");
  }

  // False where `value` is no such number.
  bool put_scalar(const Param& param, int type, AnyView value) {
    const DLDataType dtype = param.dtype;
    if (dtype.code == kDLBool) {
      return type == TypeIndex::kTVMFFIBool && (put_value(value.cast<bool>()), true);
    }
    const bool is_int = type == TypeIndex::kTVMFFIInt;
    if (dtype.code == kDLFloat) {
      if (!is_int && type != TypeIndex::kTVMFFIFloat) return false;
      const double number = is_int ? double(value.cast<int64_t>()) : value.cast<double>();
      if (dtype.bits == 64) return put_value(number), true;
      const float rounded = static_cast<float>(number);
      if (std::isinf(rounded) && !std::isinf(number)) out_of_range(param, std::to_string(number));
      return put_value(rounded), true;
    }
    if (!is_int) return false;
    const i64 number = value.cast<int64_t>();
    const bool is_signed = dtype.code == kDLInt;
    const int value_bits = dtype.bits - (is_signed ? 1 : 0);
    // Of uint64 those that Python's int of 64 bits holds; a ctypes value may be larger.
    const bool fits = value_bits >= 63 ? is_signed || number >= 0
                                       : number >= (is_signed ? -(i64(1) << value_bits) : 0) &&
                                             number < i64(1) << value_bits;
    if (!fits) out_of_range(param, std::to_string(number));
    put_bytes(&number, dtype.bits / 8, dtype.bits / 8);  // the lowest come first
    return true;
  }

  [[noreturn]] void out_of_range(const Param& param, const std::string& number) const {
    raise_value_error(signature_.op(), param.name.c_str(), number,
                      "a number that " + param.dtype_name + " holds");
  }

  // -- bytes --------------------------------------------------------------------------------------

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

  const Signature& signature_;
  int alignment_ = 1;
};

}  // namespace jitkern
