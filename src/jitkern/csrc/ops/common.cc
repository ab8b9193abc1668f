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
    expected += str(number == 1 ? "" : is_last ? " or " : ", ", '"', choice, '"');
  }
  if (!text) raise_type_error(op, arg, value, expected);
  raise_value_error(op, arg, str('"', *text, '"'), expected);
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

void require_last_dim(const Indices& indices, i64 size, const char* what) {
  const DLTensor& dl = *indices.dl;
  if (dl.ndim >= 1 && dl.shape[dl.ndim - 1] == size) return;
  indices.shape_error(str("shape [..., ", size, "] of (", what, ")"));
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

// -- overlap -------------------------------------------------------------------------------------

namespace {

// A number of strides between `low` and `high`.
struct Steps {
  i64 stride;
  i64 low;
  i64 high;
};

i64 floor_div(i64 a, i64 b) { return a / b - (a % b < 0); }

// Whether a sum of steps, the longest strides first, lies between `begin` and `end`, both excluded.
bool reaches(const Steps* steps, const Steps* last, i64 begin, i64 end) {
  if (steps == last) return begin < 0 && 0 < end;
  i64 rest_low = 0, rest_high = 0;
  for (const Steps* rest = steps + 1; rest != last; ++rest) {
    rest_low += rest->low * rest->stride;
    rest_high += rest->high * rest->stride;
  }
  const auto& [stride, low, high] = *steps;
  const i64 most = std::min(high, floor_div(end - 1 - rest_low, stride));
  for (i64 n = std::max(low, floor_div(begin - rest_high, stride) + 1); n <= most; ++n) {
    if (reaches(steps + 1, last, begin - n * stride, end - n * stride)) return true;
  }
  return false;
}

}  // namespace

Lattice::Lattice(u64 begin, i64 row_bytes, const std::array<Dim, 3>& sizes)
    : begin(begin), end(begin + static_cast<u64>(row_bytes)), row_bytes(row_bytes), dims(sizes) {
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  for (const Dim& dim : dims) end += static_cast<u64>((dim.count - 1) * dim.stride);
}

bool Lattice::has_overlap() const {
  // Nearly always each stride is as long as all rows of the shorter strides together.
  i64 bytes = row_bytes;
  bool is_nested = true;
  for (int d = 2; d >= 0; --d) {
    if (dims[d].count <= 1) continue;
    if (dims[d].stride == 0) return true;
    is_nested &= dims[d].stride >= bytes;
    bytes += (dims[d].count - 1) * dims[d].stride;
  }
  // Else two rows differ by one step or more in dimension d, and by any number in the next ones.
  for (int d = 0; !is_nested && d < 3; ++d) {
    std::vector<Steps> steps;
    for (int e = d; e < 3; ++e) {
      const i64 most = dims[e].count - 1;
      if (most > 0) steps.push_back({dims[e].stride, e == d ? 1 : -most, most});
    }
    if (dims[d].count > 1 &&
        reaches(steps.data(), steps.data() + steps.size(), -row_bytes, row_bytes)) {
      return true;
    }
  }
  return false;
}

bool Lattice::overlaps(const Lattice& other) const {
  if (begin >= other.end || other.begin >= end) return false;
  std::vector<Steps> steps;  // from a row of `other` to a row of this
  const auto add = [&steps](i64 stride, i64 low, i64 high) {
    if (stride == 0 || low == high) return;
    for (Steps& known : steps) {
      if (known.stride != stride) continue;
      known.low += low;
      known.high += high;
      return;
    }
    steps.push_back({stride, low, high});
  };
  for (const Dim& dim : dims) add(dim.stride, 0, dim.count - 1);
  for (const Dim& dim : other.dims) add(dim.stride, 1 - dim.count, 0);
  std::sort(steps.begin(), steps.end(),
            [](const Steps& a, const Steps& b) { return a.stride > b.stride; });
  const i64 distance = static_cast<i64>(begin - other.begin);
  return reaches(steps.data(), steps.data() + steps.size(), -row_bytes - distance,
                 other.row_bytes - distance);
}

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
