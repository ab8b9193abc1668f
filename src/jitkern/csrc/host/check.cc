#include <jitkern/check.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/object.h>

#include <algorithm>

namespace jitkern {

namespace {

// Stands for an int of more than 64 bits under apache-tvm-ffi before 0.1.15, which raises an
// OverflowError that names no argument (host/library.py).
struct BigInt : tvm::ffi::Object {
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.BigInt", BigInt, tvm::ffi::Object);
};

[[noreturn]] void raise(const char* kind, const char* op, const char* arg,
                        const std::string& actual, const std::string& expected) {
  raise_error(kind, str(op, ": ", arg, ": ", actual, ", expected ", expected));
}

// Python's name for the type of an argument.
std::string type_text(AnyView value) {
  const std::string key = value.GetTypeKey();
  if (key == "ffi.SmallStr" || key == "ffi.String") return "str";
  if (key == "ffi.SmallBytes" || key == "ffi.Bytes") return "bytes";
  if (key == "ffi.Array" || key == "ffi.List") return "list or tuple";
  if (key == "ffi.Map" || key == "ffi.Dict") return "dict";
  if (key == "ffi.Tensor") return "Tensor";
  if (key == "ffi.Function") return "function";
  if (key == "ffi.OpaquePyObject") return "object";
  if (key == "ffi.BigInt" || key == "jitkern.BigInt") return "int of more than 64 bits";
  if (key == "DataType") return "dtype";
  return key;
}

std::string stride_text(const Tensor& t, int dim) {
  return str("stride ", t.stride(dim), " in dimension ", dim, " of shape ", t.shape_text());
}

// Whether the bytes [begin, end) overlap one of `num_rows` rows, the first of which begins at 0.
bool overlaps_row(i64 begin, i64 end, i64 num_rows, i64 row_bytes, i64 stride_bytes) {
  if (end <= 0 || begin >= (num_rows - 1) * stride_bytes + row_bytes) return false;
  // The first row that ends after `begin` has to begin before `end`.
  const i64 ahead = begin - row_bytes;
  const i64 first_row = ahead < 0 ? 0 : ahead / stride_bytes + 1;
  return first_row * stride_bytes < end;
}

// Whether rows of two tensors overlap. Neither is empty.
bool rows_overlap(const Rows& a, const Rows& b) {
  const Rows& few = a.num_rows < b.num_rows ? a : b;
  const Rows& many = &few == &a ? b : a;
  const i64 stride = many.stride_bytes;
  const i64 step = few.stride_bytes;
  const i64 begin = static_cast<i64>(few.begin - many.begin);
  if (step == stride) {
    // Row i of `few` overlaps row j of `many` if its row 0 overlaps row j - i, which may be before
    // the first.
    const i64 ahead = (few.num_rows - 1) * step;
    return overlaps_row(begin + ahead, begin + ahead + few.row_bytes,
                        many.num_rows + few.num_rows - 1, many.row_bytes, stride);
  }
  for (i64 i = 0; i < few.num_rows; ++i) {
    const i64 at = begin + i * step;
    if (overlaps_row(at, at + few.row_bytes, many.num_rows, many.row_bytes, stride)) return true;
  }
  return false;
}

}  // namespace

bool may_be_lazy(AnyView value) {
  if (const auto* list = value.as<tvm::ffi::ArrayObj>()) {
    return std::any_of(list->begin(), list->end(), may_be_lazy);
  }
  const auto tensor = value.try_cast<DLTensor*>();
  if (!tensor.has_value()) return false;
  const DLTensor& dl = **tensor;
  if (dl.dtype.code == kDLComplex) return true;
  if (dl.dtype.code != kDLFloat || dl.strides == nullptr) return false;
  bool has_stride = false;
  for (int d = dl.ndim - 1; d >= 0; --d) {
    if (dl.shape[d] <= 1) continue;
    if (dl.strides[d] == 0 || dl.strides[d] % 2 != 0) return false;
    has_stride = true;
  }
  return has_stride;
}

Tensor::Tensor(const char* op, const char* arg, AnyView value) : op(op), arg(arg), dl(nullptr) {
  const auto tensor = value.try_cast<DLTensor*>();
  if (!tensor.has_value()) raise_type_error(op, arg, value, "a tensor");
  dl = *tensor;
  const auto type = dl->device.device_type;
  if (type != kDLCPU && type != kDLCUDAHost && type != kDLCUDA) {
    value_error("device " + device_name(), "cpu or cuda");
  }
  // A zero tensor, or one whose storage was resized to nothing, has a shape but no memory.
  if (dl->data == nullptr && numel() > 0) value_error("no memory behind it", "allocated memory");
}

void Tensor::value_error(const std::string& actual, const std::string& expected) const {
  raise("ValueError", op, arg, actual, expected);
}

void Tensor::type_error(const std::string& actual, const std::string& expected) const {
  raise("TypeError", op, arg, actual, expected);
}

i64 Tensor::numel() const {
  return tvm::ffi::ShapeView(dl->shape, static_cast<size_t>(dl->ndim)).Product();
}

std::string Tensor::device_name() const {
  const auto type = dl->device.device_type;
  if (type == kDLCPU || type == kDLCUDAHost) return "cpu";
  return str(type == kDLCUDA ? "cuda" : str("type ", int(type)), ":", dl->device.device_id);
}

std::string Tensor::dtype_name() const {
  // Complex types have no name in tvm-ffi.
  if (dl->dtype.code == kDLComplex) return str("complex", dl->dtype.bits);
  return tvm::ffi::DLDataTypeToString(dl->dtype);
}

std::string shape_text(const int64_t* sizes, size_t count) {
  std::string text = "[";
  for (size_t d = 0; d < count; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

void Tensor::same_dtype(const Tensor& other) const {
  if (dl->dtype == other.dl->dtype) return;
  dtype_error(other.dtype_name() + " as in " + other.arg);
}

void Tensor::same_device(const Tensor& other) const {
  if (ordinal() == other.ordinal()) return;
  value_error("device " + device_name(), other.device_name() + " as in " + other.arg);
}

void Tensor::contiguous(const char* cure) const {
  if (numel() == 0) return;  // with any strides, as in PyTorch
  i64 expected = 1;
  for (int d = dl->ndim - 1; d >= 0; --d) {
    if (dl->shape[d] != 1 && dl->strides != nullptr && dl->strides[d] != expected) {
      value_error(str("not contiguous (", stride_text(*this, d), ")"),
                  str("a contiguous tensor", cure));
    }
    expected *= dl->shape[d];
  }
}

i64 Tensor::stride(int dim) const {
  if (dl->strides != nullptr) return dl->strides[dim];
  i64 items = 1;
  for (int d = dl->ndim - 1; d > dim; --d) items *= dl->shape[d];
  return items;
}

void Tensor::refuse_stride(int dim) const { value_error(stride_text(*this, dim), "0 or more"); }

i64 Tensor::row_items(int row_dim, const char* cure) const {
  i64 items = 1;
  for (int d = dl->ndim - 1; d >= row_dim; --d) {
    if (dl->shape[d] > 1 && items > 0 && dl->strides != nullptr && dl->strides[d] != items) {
      value_error(stride_text(*this, d), str("contiguous rows, stride ", items, cure));
    }
    items *= dl->shape[d];
  }
  return items;
}

Rows::Rows(const Tensor& t, int row_dims, const char* cure)
    : Tensor(t), data(t.data()), num_rows(1), stride_bytes(0) {
  const DLTensor& dl = *t.dl;
  if (dl.ndim < row_dims) {
    t.shape_error(str("at least ", row_dims, row_dims == 1 ? " dimension" : " dimensions"));
  }
  row_bytes = t.row_items(row_dims, cure) * t.item_bytes();
  stride_bytes = row_bytes;
  for (int d = row_dims - 1; d >= 0; --d) {
    if (dl.shape[d] > 1) {
      const i64 here = t.stride(d) * t.item_bytes();
      if (here < 0) t.refuse_stride(d);
      if (num_rows == 1) {
        stride_bytes = here;
      } else if (num_rows > 1 && here != num_rows * stride_bytes) {
        t.value_error(stride_text(t, d), str("equally spaced rows", cure));
      }
    }
    num_rows *= dl.shape[d];
  }
  set_range();
}

Rows::Rows(const Tensor& tensor, i64 num_rows, i64 row_bytes, i64 stride_bytes)
    : Tensor(tensor),
      data(tensor.data()),
      num_rows(num_rows),
      row_bytes(row_bytes),
      stride_bytes(stride_bytes) {
  set_range();
}

void Rows::set_range() {
  // Unsigned, as it may overflow for an empty tensor.
  begin = address(data);
  end = begin + static_cast<u64>(num_rows - 1) * static_cast<u64>(stride_bytes) +
        static_cast<u64>(row_bytes);
}

Indices::Indices(const Tensor& t) : Tensor(t), data(t.data()), count(t.numel()) {
  if (!t.has_dtype(kDLInt, 32) && !t.has_dtype(kDLInt, 64)) t.dtype_error("int32 or int64");
  t.contiguous(kCopyForReads);
  index_bytes = t.dl->dtype.bits / 8;
}

void raise_error(const char* kind, const std::string& message) {
  throw tvm::ffi::Error(kind, message, "");
}

void raise_value_error(const char* op, const char* arg, const std::string& actual,
                       const std::string& expected) {
  raise("ValueError", op, arg, actual, expected);
}

void raise_type_error(const char* op, const char* arg, AnyView actual,
                      const std::string& expected) {
  raise("TypeError", op, arg, type_text(actual), expected);
}

i64 int_arg(const char* op, const char* arg, AnyView value) {
  if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFIInt) return value.cast<int64_t>();
  raise_type_error(op, arg, value, "an int");
}

bool bool_arg(const char* op, const char* arg, AnyView value) {
  if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFIBool) return value.cast<bool>();
  raise_type_error(op, arg, value, "a bool");
}

void Rows::same_row_bytes(const Rows& other, const char* note) const {
  if (row_bytes == other.row_bytes) return;
  value_error(
      str("rows of ", row_bytes, " bytes (shape ", shape_text(), ")"),
      str(other.row_bytes, " bytes as in ", other.arg, " (shape ", other.shape_text(), ")", note));
}

void Rows::same_num_rows(const Rows& other) const {
  if (num_rows == other.num_rows) return;
  value_error(str(num_rows, " rows (shape ", shape_text(), ")"),
              str(other.num_rows, " rows as in ", other.arg));
}

void Rows::distinct_rows() const {
  if (num_rows <= 1 || stride_bytes >= row_bytes) return;
  value_error(
      str("rows of ", row_bytes, " bytes, ", stride_bytes, " bytes apart (shape ", shape_text(),
          ")"),
      str(row_bytes, " or more in a tensor that is written, as one that was expanded is not"));
}

void Rows::apart_from(const Rows& other, const char* expected) const {
  const bool may_overlap = begin < other.end && other.begin < end;
  if (may_overlap && !empty() && !other.empty() && rows_overlap(*this, other)) {
    value_error(str("overlaps ", other.arg), expected);
  }
}

void Rows::one_per_index(const Indices& indices) const {
  if (num_rows == indices.count) return;
  value_error(str(num_rows, " rows (shape ", shape_text(), ")"),
              str(indices.count, " rows, one for each index in ", indices.arg));
}

void Indices::apart_from(const Rows& rows) const {
  const i64 bytes = count * index_bytes;
  Rows(*this, 1, bytes, bytes).apart_from(rows);
}

void Indices::check_below(i64 bound, i64 noted, const char* note) const {
  with_index([&](const auto index_at) {
    for (i64 i = 0; i < count; ++i) {
      const i64 index = index_at(i);
      if (index >= std::max(bound, noted)) raise_index_error(op, arg, i, index, bound);
      if (index >= bound) raise_index_error(op, arg, i, index, bound, note);
    }
  });
}

void raise_index_error(const char* op, const char* arg, i64 position, i64 value, i64 bound,
                       const char* note) {
  raise_error("IndexError", str(op, ": ", arg, ": index ", value, " at position ", position,
                                ", expected below ", bound, note));
}

static tvm::ffi::ObjectRef big_int() {
  return tvm::ffi::ObjectRef(tvm::ffi::make_object<BigInt>());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(big_int, big_int);

}  // namespace jitkern
