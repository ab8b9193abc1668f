#include "common.h"

#include <tvm/ffi/string.h>

#include <string>

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
    expected += (number == 1 ? "" : is_last ? " or " : ", ") + ("\"" + std::string(choice) + "\"");
  }
  if (!text) raise_type_error(op, arg, value, expected);
  raise_value_error(op, arg, "\"" + std::string(*text) + "\"", expected);
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
                   are_swapped ? std::string("cpu, in the order ") + order : "cpu");
}

void require_last_dim(const Indices& indices, i64 size, const char* what) {
  const DLTensor& dl = *indices.dl;
  if (dl.ndim >= 1 && dl.shape[dl.ndim - 1] == size) return;
  indices.value_error("shape " + indices.shape_text(),
                      "shape [..., " + std::to_string(size) + "] of (" + what + ")");
}

Rows as_one_row(const Tensor& tensor, u64 begin, u64 end) {
  const i64 bytes = static_cast<i64>(end - begin);
  Rows row(tensor, 1, bytes, bytes);
  row.data = reinterpret_cast<char*>(begin);
  row.begin = begin;
  row.end = end;
  return row;
}

CountArg::CountArg(const char* op, AnyView value, const Indices& list) {
  if (is_none(value)) return;
  indices.emplace(op, "count", value);
  indices->same_device(list);
  if (indices->count != 1) indices->value_error("shape " + indices->shape_text(), "1 element");
}

i64 CountArg::read(i64 size) const {
  i64 count = size;
  if (indices) {
    indices->with_index(
        [&](const auto index_at) { count = std::clamp<i64>(index_at(0), 0, size); });
  }
  return count;
}

void require_no_capture(const LaunchScope& scope, const Indices& host_list,
                        const std::string& expected) {
  int status = 0;
  const Driver& driver = Driver::get();
  driver.check(driver.cuStreamIsCapturing(scope.stream(), &status), "cuStreamIsCapturing");
  if (status != 0) host_list.value_error("device cpu while a graph is captured", expected);
}

}  // namespace jitkern
