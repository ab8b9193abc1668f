// fast_compare_key: checks, then the first difference in SIMD. CPU only.
#include "compare_key_simd.h"

#include <jitkern/check.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <string>

namespace jitkern {

namespace {

constexpr const char* kOp = "fast_compare_key";

Indices key_of(const char* arg, AnyView value) {
  const Tensor key(kOp, arg, value);
  if (key.on_cuda()) key.value_error("device " + key.device_name(), "cpu");
  if (key.dl->ndim != 1) key.value_error("shape " + key.shape_text(), "1 dimension");
  return Indices(key);
}

i64 common_prefix(FirstDifference first_difference, AnyView x_arg, AnyView y_arg, AnyView start_arg,
                  AnyView page_size_arg) {
  const Indices x = key_of("x", x_arg);
  const Indices y = key_of("y", y_arg);
  y.same_dtype(x);
  const i64 start = int_arg(kOp, "start", start_arg);
  if (start < 0 || start > x.count) {
    raise_value_error(kOp, "start", std::to_string(start),
                      "0 to " + std::to_string(x.count) + ", the length of x");
  }
  const i64 page_size = int_arg(kOp, "page_size", page_size_arg);
  if (page_size < 1) {
    raise_value_error(kOp, "page_size", std::to_string(page_size), "at least 1");
  }
  // Both dtypes are whole numbers of words, and the first word that differs lies in the first item
  // that differs.
  const int item_words = x.index_bytes / 4;
  const i64 num_items = std::min(x.count - start, y.count);
  const i64 num_words = first_difference(static_cast<const u32*>(x.data) + start * item_words,
                                         static_cast<const u32*>(y.data), num_items * item_words);
  const i64 length = num_words / item_words;
  return length - length % page_size;
}

FirstDifference best_first_difference() {
  for (const CompareLevel& level : kCompareLevels) {
    if (level.supported()) return level.first_difference;
  }
  return first_difference_portable;
}

i64 compare_key(AnyView x, AnyView y, AnyView start, AnyView page_size) {
  static const FirstDifference best = best_first_difference();
  return common_prefix(best, x, y, start, page_size);
}

// For tests and benchmarks: the same with a named instruction set of compare_key_levels().
i64 compare_key_with(tvm::ffi::String name, AnyView x, AnyView y, AnyView start,
                     AnyView page_size) {
  for (const CompareLevel& level : kCompareLevels) {
    if (level.name == std::string_view(name.data(), name.size()) && level.supported()) {
      return common_prefix(level.first_difference, x, y, start, page_size);
    }
  }
  raise_value_error(kOp, "level", std::string(name), "one of compare_key_levels()");
}

// The instruction sets that this CPU can run, the one in use first: "avx512 avx2 portable".
tvm::ffi::String compare_key_levels() {
  std::string names;
  for (const CompareLevel& level : kCompareLevels) {
    if (level.supported()) names += (names.empty() ? "" : " ") + std::string(level.name);
  }
  return names;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(compare_key, compare_key);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compare_key_with, compare_key_with);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compare_key_levels, compare_key_levels);

}  // namespace

}  // namespace jitkern
