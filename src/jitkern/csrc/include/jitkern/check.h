// Checks of an op's arguments on the host. Every message reads
//   op: argument: what came, expected what
// Each op checks everything here before it launches or writes anything.
#pragma once

#include <jitkern/types.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>

#include <string>

namespace jitkern {

using tvm::ffi::AnyView;

// One tensor argument together with the names that a message about it needs.
struct Tensor {
  const char* op;
  const char* arg;
  const DLTensor* dl;

  // TypeError unless `value` is a tensor in CPU or CUDA memory.
  Tensor(const char* op, const char* arg, AnyView value);

  [[noreturn]] void value_error(const std::string& came, const std::string& expected) const;
  [[noreturn]] void type_error(const std::string& came, const std::string& expected) const;

  char* data() const { return static_cast<char*>(dl->data) + dl->byte_offset; }
  bool on_cuda() const { return dl->device.device_type == kDLCUDA; }
  i64 numel() const;
  i64 item_bytes() const { return (i64(dl->dtype.bits) * dl->dtype.lanes + 7) / 8; }
  std::string device_name() const;
  std::string dtype_name() const;
  std::string shape_text() const;

  void same_dtype(const Tensor& other) const;
  void same_device(const Tensor& other) const;
  void contiguous() const;
};

// A tensor seen as rows of bytes: the first `row_dims` dimensions count rows, the others are one
// contiguous row.
struct Rows {
  char* data;
  i64 num_rows;
  i64 row_bytes;
  i64 stride_bytes;

  // ValueError unless rows are contiguous and equally spaced.
  explicit Rows(const Tensor& tensor, int row_dims = 1);

  // Bytes from the first to behind the last row.
  i64 span_bytes() const {
    return num_rows == 0 || row_bytes == 0 ? 0 : (num_rows - 1) * stride_bytes + row_bytes;
  }
};

// A contiguous tensor of int32 or int64.
struct Indices {
  const void* data;
  i64 count;
  int index_bytes;

  // TypeError on any other dtype, ValueError where it is not contiguous.
  explicit Indices(const Tensor& tensor);
};

[[noreturn]] void raise_value_error(const char* op, const char* arg, const std::string& came,
                                    const std::string& expected);

// A plain integer argument. TypeError on anything else (a bool included).
i64 int_arg(const char* op, const char* arg, AnyView value);

// True or False. TypeError on anything else.
bool bool_arg(const char* op, const char* arg, AnyView value);

// ValueError unless both tensors have rows of the same number of bytes, or the same number of rows.
void same_row_bytes(const Tensor& a, const Rows& a_rows, const Tensor& b, const Rows& b_rows);
void same_num_rows(const Tensor& a, const Rows& a_rows, const Tensor& b, const Rows& b_rows);

// ValueError unless there is one row for each index.
void one_row_per_index(const Tensor& tensor, const Rows& rows, const Tensor& indices);

// The widest vector (16, 8, 4, 2 or 1 bytes) that divides every one of the addresses and sizes.
template <class... Bits>
int vec_bytes_for(Bits... bits) {
  const u64 all = (static_cast<u64>(bits) | ... | 16u);
  return static_cast<int>(all & ~(all - 1));
}

inline u64 address(const void* pointer) { return reinterpret_cast<u64>(pointer); }

// Raises IndexError for index `value` at flat position `position` of `arg`; `note` ends the text.
[[noreturn]] void raise_index_error(const char* op, const char* arg, i64 position, i64 value,
                                    i64 bound, const char* note);

}  // namespace jitkern
