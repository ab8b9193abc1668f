// Objects that cross between libraries built against different versions of tvm-ffi: one is built
// against the oldest, as the wheel's host module is, one against the installed version. The headers
// read the memory of arrays, maps, strings and errors in inline code.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <sstream>

using namespace tvm::ffi;

// Reads a value of each type; calls the function with 20.
static String render(bool flag, int64_t integer, double number, DLDataType dtype, String small,
                     String large, Bytes raw, Tensor tensor, Function add, Shape shape,
                     Array<int64_t> items, Map<String, int64_t> few, Map<String, int64_t> many) {
  std::ostringstream out;
  out << flag << " " << integer << " " << number << " " << DLDataTypeToString(dtype) << " "
      << std::string(small) << " " << std::string(large) << " " << std::string(raw);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    out << " " << static_cast<const int64_t*>(tensor.data_ptr())[i];
  }
  out << " " << add(20).cast<int64_t>();
  for (int64_t extent : shape) out << " " << extent;
  for (int64_t item : items) out << " " << item;
  for (const auto& map : {few, many}) {
    int64_t sum = 0;
    for (const auto& [key, value] : map) sum += value;
    out << " " << map.size() << " " << sum << " " << map.at("key1");
  }
  return out.str();
}

// A map of up to four entries has another layout than a larger one.
static Map<String, int64_t> make_map(int64_t size) {
  Map<String, int64_t> map;
  for (int64_t i = 0; i < size; ++i) map.Set("key" + std::to_string(i), i);
  return map;
}

static Array<Any> make_values(Tensor tensor, Function function) {
  Array<Any> items;
  for (int64_t i = 0; i < 20; ++i) items.push_back(i);
  return {true,
          int64_t{7},
          2.5,
          DLDataType{kDLFloat, 16, 1},
          String("short"),
          String("a text of more than seven bytes"),
          Bytes("raw"),
          tensor,
          function,
          Shape({3, 4}),
          items,
          make_map(2),
          make_map(20)};
}

static Function make_adder(int64_t amount) {
  return Function::FromTyped([amount](int64_t value) { return value + amount; });
}

static void raise_error(String kind, String message) { throw Error(kind, message, ""); }

// Returns kind and message of the error that `function` raises.
static String name_error(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.kind() + ": " + error.message();
  }
  return "none";
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(render, render);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_values, make_values);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_adder, make_adder);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raise_error, raise_error);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(name_error, name_error);
