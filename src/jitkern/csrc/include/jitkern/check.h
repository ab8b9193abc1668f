// Checks of an op's arguments on the host. Every message reads
//   op: argument: the actual value, expected ...
// An op checks everything before it launches or writes anything.
#pragma once

#include <jitkern/types.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>

#include <string>
#include <type_traits>

namespace jitkern {

using tvm::ffi::AnyView;

inline u64 address(const void* pointer) { return reinterpret_cast<u64>(pointer); }

// Whether a dispatch mode or a tracer of PyTorch is active in this thread. True if unknown.
bool torch_has_to_see_it();

// Whether an argument may be a lazy view of PyTorch's, whose memory holds other values: conjugates
// are complex, and the imaginary part of one, which is negated, has even strides only.
bool may_be_lazy(AnyView value);

// An op as Python calls it. Returns true, and does nothing, if the call has to go through PyTorch's
// dispatcher.
template <auto kOp>
struct UnlessTorch;
template <typename... Args, void (*kOp)(Args...)>
struct UnlessTorch<kOp> {
  static bool call(Args... args) {
    if (torch_has_to_see_it() || (may_be_lazy(args) || ...)) return true;
    kOp(args...);
    return false;
  }
};

// Exports an op twice: as `name`, and as `name`_now, which always runs it.
#define JITKERN_EXPORT_OP(name, op)                                      \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, ::jitkern::UnlessTorch<op>::call); \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name##_now, op)

// Concatenates its arguments, like c10::str.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_arithmetic_v<Part> && !std::is_same_v<Part, char>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

// "[3, 4]"
std::string shape_text(const int64_t* sizes, size_t count);

// The end of messages about the strides of tensors that are only read: what an op writes to a copy
// is lost.
constexpr const char* kCopyForReads = "; .contiguous() makes a copy";

// A tensor argument with the names for messages about it.
struct Tensor {
  const char* op;
  const char* arg;
  const DLTensor* dl;

  // TypeError unless `value` is a tensor in CPU or CUDA memory.
  Tensor(const char* op, const char* arg, AnyView value);

  [[noreturn]] void value_error(const std::string& actual, const std::string& expected) const;
  [[noreturn]] void type_error(const std::string& actual, const std::string& expected) const;
  [[noreturn]] void shape_error(const std::string& expected) const {
    value_error("shape " + shape_text(), expected);
  }
  [[noreturn]] void dtype_error(const std::string& expected) const {
    type_error("dtype " + dtype_name(), expected);
  }

  char* data() const { return static_cast<char*>(dl->data) + dl->byte_offset; }
  bool on_cuda() const { return dl->device.device_type == kDLCUDA; }
  int ordinal() const { return on_cuda() ? dl->device.device_id : -1; }  // of the GPU, -1: none
  i64 numel() const;
  i64 item_bytes() const { return (i64(dl->dtype.bits) * dl->dtype.lanes + 7) / 8; }
  bool has_dtype(int code, int bits) const {
    return dl->dtype.code == code && dl->dtype.bits == bits && dl->dtype.lanes == 1;
  }
  std::string device_name() const;
  std::string dtype_name() const;
  std::string shape_text() const { return jitkern::shape_text(dl->shape, dl->ndim); }

  void same_dtype(const Tensor& other) const;
  void same_device(const Tensor& other) const;
  void contiguous(const char* cure = "") const;
  i64 stride(int dim) const;  // in items
  // The items of the dimensions from `row_dim` on. ValueError unless they are contiguous;
  // `cure` ends the text.
  i64 row_items(int row_dim, const char* cure = "") const;
  // ValueError: the stride is negative.
  [[noreturn]] void refuse_stride(int dim) const;
};

struct Indices;

constexpr const char* kOwnMemory = "memory of its own";

// A tensor seen as rows of bytes: the first `row_dims` dimensions count rows, the others are one
// contiguous row.
struct Rows : Tensor {
  char* data;
  i64 num_rows;
  i64 row_bytes;
  i64 stride_bytes;
  u64 begin;  // address of the first byte, unless it is empty
  u64 end;    // after the last

  // ValueError unless rows are contiguous, equally spaced and in rising order.
  explicit Rows(const Tensor& tensor, int row_dims = 1, const char* cure = "");
  Rows(const char* op, const char* arg, AnyView value) : Rows(Tensor(op, arg, value)) {}
  // Rows of the given sizes from the tensor's first byte on.
  Rows(const Tensor& tensor, i64 num_rows, i64 row_bytes, i64 stride_bytes);

  bool empty() const { return num_rows == 0 || row_bytes == 0; }

  // ValueError if rows share bytes; for tensors that the op writes.
  void distinct_rows() const;

  // ValueError if a row shares a byte with a row of `other`. Rows may interleave.
  void apart_from(const Rows& other, const char* expected = kOwnMemory) const;

  // ValueError unless both have the same row size (`note` ends the text); the same number of rows;
  // one row per index.
  void same_row_bytes(const Rows& other, const char* note = "") const;
  void same_num_rows(const Rows& other) const;
  void one_per_index(const Indices& indices) const;

 private:
  void set_range();
};

// Whether 0 <= index < bound, in one comparison.
inline bool is_below(i64 index, i64 bound) {
  return static_cast<u64>(index) < static_cast<u64>(bound);
}

// A contiguous tensor of int32 or int64.
struct Indices : Tensor {
  const void* data;
  i64 count;
  int index_bytes;

  // TypeError on any other dtype, ValueError if it is not contiguous.
  explicit Indices(const Tensor& tensor);
  Indices(const char* op, const char* arg, AnyView value) : Indices(Tensor(op, arg, value)) {}

  // Calls `use` with a function that reads index i. Another thread may write it meanwhile: read it
  // once, and check the value that is used. On CPU tensors only.
  template <class Use>
  void with_index(const Use& use) const {
    const auto reader = [](const auto* items) {
      return [items](i64 i) { return i64(__atomic_load_n(items + i, __ATOMIC_RELAXED)); };
    };
    index_bytes == 4 ? use(reader(static_cast<const int32_t*>(data)))
                     : use(reader(static_cast<const int64_t*>(data)));
  }

  // IndexError for the first index of `bound` or more, with `note` if it is below `noted`. On CPU
  // tensors only.
  void check_below(i64 bound, i64 noted = 0, const char* note = "") const;

  // ValueError if an index lies in a row; between rows is allowed.
  void apart_from(const Rows& rows) const;
};

// Python's error of this kind.
[[noreturn]] void raise_error(const char* kind, const std::string& message);
[[noreturn]] void raise_value_error(const char* op, const char* arg, const std::string& actual,
                                    const std::string& expected);
[[noreturn]] void raise_type_error(const char* op, const char* arg, AnyView actual,
                                   const std::string& expected);

// The value of an int (a bool is none), or of a bool; else TypeError.
i64 int_arg(const char* op, const char* arg, AnyView value);
bool bool_arg(const char* op, const char* arg, AnyView value);

// The widest vector (16 to 1 bytes) that divides all addresses and sizes whose bitwise OR is
// `bits`.
inline int widest_vec(u64 bits) {
  bits |= 16;
  return static_cast<int>(bits & ~(bits - 1));
}

// The widest vector for copies between these tensors.
template <class... Tables>
int vec_bytes_for(const Tables&... rows) {
  return widest_vec(
      (static_cast<u64>(rows.row_bytes | rows.stride_bytes | address(rows.data)) | ...));
}

// IndexError for index `value` at flat position `position` of `arg`; `note` ends the text.
[[noreturn]] void raise_index_error(const char* op, const char* arg, i64 position, i64 value,
                                    i64 bound, const char* note = "; nothing was written");

inline bool is_none(AnyView value) {
  return value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone;
}

}  // namespace jitkern
