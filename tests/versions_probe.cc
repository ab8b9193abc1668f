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

#include <map>
#include <sstream>

using namespace tvm::ffi;

// Renders a value of any of the types below; calls a function with 20.
static void write(std::ostream& out, const Any& value) {
  switch (value.type_index()) {
    case TypeIndex::kTVMFFINone:
      out << "None";
      return;
    case TypeIndex::kTVMFFIBool:
      out << (value.cast<bool>() ? "true" : "false");
      return;
    case TypeIndex::kTVMFFIInt:
      out << value.cast<int64_t>();
      return;
    case TypeIndex::kTVMFFIFloat:
      out << value.cast<double>();
      return;
    case TypeIndex::kTVMFFIDataType:
      out << DLDataTypeToString(value.cast<DLDataType>());
      return;
    case TypeIndex::kTVMFFISmallStr:
    case TypeIndex::kTVMFFIStr:
      out << std::string(value.cast<String>());
      return;
    case TypeIndex::kTVMFFISmallBytes:
    case TypeIndex::kTVMFFIBytes:
      out << "bytes " << std::string(value.cast<Bytes>());
      return;
    case TypeIndex::kTVMFFIFunction:
      write(out, value.cast<Function>()(20));
      return;
    case TypeIndex::kTVMFFIShape:
      for (int64_t extent : value.cast<Shape>()) out << extent << "x";
      return;
    case TypeIndex::kTVMFFITensor: {
      const auto tensor = value.cast<Tensor>();
      for (int64_t i = 0; i < tensor.numel(); ++i) {
        out << static_cast<const int64_t*>(tensor.data_ptr())[i] << ";";
      }
      return;
    }
    case TypeIndex::kTVMFFIArray:
      out << "[";
      for (const Any& item : value.cast<Array<Any>>()) {
        write(out, item);
        out << ",";
      }
      out << "]";
      return;
    case TypeIndex::kTVMFFIMap: {
      std::map<std::string, int64_t> sorted;
      for (const auto& [key, item] : value.cast<Map<String, int64_t>>()) sorted[key] = item;
      for (const auto& [key, item] : sorted) out << key << "=" << item << ",";
      return;
    }
    default:
      TVM_FFI_THROW(TypeError) << "no value of this type: " << value.GetTypeKey();
  }
}

static String render(Any value) {
  std::ostringstream out;
  write(out, value);
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
  return {nullptr,
          true,
          int64_t{7},
          2.5,
          DLDataType{kDLFloat, 16, 1},
          String("short"),
          String("a text of more than seven bytes"),
          Bytes("raw"),
          tensor,
          function,
          Shape({3, 4}),
          Array<Any>(),
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
