#include "common.h"

#include <tvm/ffi/string.h>

#include "floats.h"

namespace jitkern {

int choice_arg(const char* op, const char* arg, AnyView value,
               std::initializer_list<const char*> choices) {
  if (is_none(value)) return 0;
  const auto text = value.as<tvm::ffi::String>();
  std::string expected;
  int number = 0;
  for (const char* choice : choices) {
    if (text && *text == choice) return number;
    const bool is_last = ++number == static_cast<int>(choices.size());
    expected += str(number == 1 ? "" : is_last ? " or " : ", ", "'", choice, "'");
  }
  if (!text) raise_type_error(op, arg, value, expected);
  raise_value_error(op, arg, str("'", *text, "'"), expected);
}

std::optional<i64> num_sms_arg(const char* op, AnyView value) {
  if (is_none(value)) return std::nullopt;
  const i64 num_sms = int_arg(op, "num_sms", value);
  if (num_sms < 1) raise_value_error(op, "num_sms", std::to_string(num_sms), "at least 1");
  return num_sms;
}

void require_host_memory(const Rows& host, const Rows& device, const char* order) {
  if (!host.on_cuda()) return;
  const bool are_swapped = !device.on_cuda();
  host.value_error("device " + host.device_name(),
                   are_swapped ? str("cpu, in the order ", order) : "cpu");
}

char* address_on_gpu(const Rows& rows) {
  return rows.on_cuda() || rows.empty() ? rows.data : mapped_rows(rows);
}

void require_last_dim(const Tensor& indices, i64 size, const char* what, const char* note) {
  const DLTensor& dl = *indices.dl;
  if (dl.ndim >= 1 && dl.shape[dl.ndim - 1] == size) return;
  indices.shape_error(str("shape [..., ", size, "] of (", what, ")", note));
}

std::vector<std::string> item_names(const char* arg, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(str(arg, "[", i, "]"));
  return names;
}

int float_type(const Tensor& tensor, bool with_fp8) {
  if (tensor.has_dtype(kDLFloat, 32)) return kFloat32;
  if (tensor.has_dtype(kDLFloat, 16)) return kFloat16;
  if (tensor.has_dtype(kDLBfloat, 16)) return kBFloat16;
  if (with_fp8 && tensor.has_dtype(kDLFloat8_e4m3fn, 8)) return kFloat8E4M3;
  tensor.dtype_error(with_fp8 ? "float32, float16, bfloat16 or float8_e4m3fn"
                              : "float32, float16 or bfloat16");
}

// -- grids
// -------------------------------------------------------------------------------------------

Grid::Grid(const Tensor& tensor, int outer_dim, int inner_dim, int row_dim)
    : Tensor(tensor),
      data(tensor.data()),
      outer(dl->shape[outer_dim]),
      inner(dl->shape[inner_dim]),
      row_bytes(row_items(row_dim) * item_bytes()) {
  const auto stride_of = [&](int dim) {
    if (dl->shape[dim] <= 1) return i64(0);
    if (stride(dim) < 0) refuse_stride(dim);
    return stride(dim) * item_bytes();
  };
  outer_stride = stride_of(outer_dim);
  inner_stride = stride_of(inner_dim);
  begin = end = address(data);
  if (empty()) return;
  end += static_cast<u64>((outer - 1) * outer_stride + (inner - 1) * inner_stride + row_bytes);
}

Grid Grid::moved_by(i64 bytes) const {
  Grid moved = *this;
  moved.data += bytes;
  moved.begin += static_cast<u64>(bytes);
  moved.end += static_cast<u64>(bytes);
  return moved;
}

bool Grid::is_same_place_as(const Grid& other) const {
  return data == other.data && row_bytes == other.row_bytes && inner == other.inner &&
         outer_stride == other.outer_stride && inner_stride == other.inner_stride;
}

void Grid::distinct_rows() const {
  if (empty() || !lattice().has_overlap()) return;
  value_error(str("rows of ", row_bytes, " bytes that overlap, ", outer_stride, " and ",
                  inner_stride, " bytes apart (shape ", shape_text(), ")"),
              "rows apart in a tensor that is written, as those of one that was expanded are not");
}

void Grid::apart_from(const Grid& other, const char* expected) const {
  if (empty() || other.empty() || begin >= other.end || other.begin >= end) return;
  if (lattice().overlaps(other.lattice())) value_error(str("overlaps ", other.arg), expected);
}

Rows Grid::whole() const {
  const i64 bytes = static_cast<i64>(end - begin);
  Rows rows(*this, 1, bytes, bytes);
  rows.data = data;
  rows.begin = begin;
  rows.end = end;
  return rows;
}

char* Grid::on_gpu() const { return on_cuda() ? data : mapped_rows(whole()); }

// -- lists ---------------------------------------------------------------------------------------

CountArg::CountArg(const char* op, AnyView value, const Indices& list) {
  if (is_none(value)) return;
  indices.emplace(op, "count", value);
  indices->same_device(list);
  if (indices->count != 1) indices->shape_error("1 element");
}

i64 CountArg::read(i64 size) const {
  i64 count = size;
  if (indices) indices->with_index([&](const auto at) { count = std::clamp<i64>(at(0), 0, size); });
  return count;
}

void require_no_capture(const LaunchScope& scope, const Indices& host_list,
                        const std::string& expected) {
  if (!is_capturing(scope.stream())) return;
  host_list.value_error("device cpu while a graph is captured", expected);
}

}  // namespace jitkern
