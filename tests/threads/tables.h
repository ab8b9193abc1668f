// Calls of h2d_gather with pairs on the host, and the expected results.
#pragma once

#include <sanitizer/asan_interface.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "fake_gpu.h"

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::String;
using tvm::ffi::Tuple;

#define EXPORTED(name)                                                           \
  extern "C" int __tvm_ffi_##name(void*, const TVMFFIAny*, int32_t, TVMFFIAny*); \
  static Function name() { return Function::FromExternC(nullptr, __tvm_ffi_##name, nullptr); }
EXPORTED(set_resolver)
EXPORTED(h2d_gather)
#undef EXPORTED

namespace calls {

using fake::CUstream;
using jitkern::i64;

// Under ThreadSanitizer, which needs no more of a kind than one.
#if defined(__SANITIZE_THREAD__)
constexpr bool kIsSlow = true;
#else
constexpr bool kIsSlow = false;
#endif

inline std::string running_case;

// Ends the program, naming the case, unless it is so.
inline void require(bool so, const std::string& what) {
  if (so) return;
  std::fprintf(stderr, "FAILED: %s: %s\n", running_case.c_str(), what.c_str());
  std::abort();
}

inline i64 mixed(i64 a, i64 b) {
  uint64_t x = static_cast<uint64_t>(a) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(b);
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
  return static_cast<i64>((x ^ (x >> 27)) >> 1);
}

// Number i of a list that has each of [0, count) once.
inline i64 shuffled(i64 i, i64 count, i64 seed) {
  i64 step = mixed(seed, count) % count | 1;
  while (std::gcd(step, count) != 1) ++step;
  return static_cast<i64>((static_cast<unsigned __int128>(step) * i + seed) % count);
}

inline CUstream current_stream(int device) {
  return static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device));
}

// On a line; AddressSanitizer sees what is touched outside of it.
class Memory {
 public:
  enum Kind { kPageable, kPinned, kDevice };
  Memory(i64 bytes, Kind kind, int device = 0)
      : bytes_(bytes),
        kind_(kind),
        whole_(static_cast<size_t>(bytes / 64 + 1) * 64),
        data_(static_cast<char*>(std::aligned_alloc(64, whole_))) {
    ASAN_POISON_MEMORY_REGION(data_ + bytes, whole_ - static_cast<size_t>(bytes));
    if (kind == kPageable) return;
    fake::know(data_, bytes,
               kind == kPinned ? jitkern::kMemoryTypeHost : jitkern::kMemoryTypeDevice, device);
  }
  ~Memory() {
    if (kind_ != kPageable) fake::forget(data_);
    ASAN_UNPOISON_MEMORY_REGION(data_, whole_);
    std::memset(data_, 0xDD, whole_);
    std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  i64 bytes() const { return bytes_; }

 private:
  const i64 bytes_;
  const Kind kind_;
  const size_t whole_;
  char* const data_;
};

// A caching allocator's memory: its last owner may have work queued that writes it, and the next
// one gets it once the stream has come to where it was freed.
struct Allocation {
  Memory memory;
  int64_t bytes;
  CUstream stream;
  DLManagedTensorVersioned managed;

  Allocation(int64_t bytes, DLDevice device)
      : memory(bytes, Memory::kDevice, device.device_id),
        bytes(bytes),
        stream(current_stream(device.device_id)),
        managed{} {
    char* const data = memory.data();
    fake::run_on(stream, [=] { std::memset(data, 0xCC, static_cast<size_t>(bytes)); });
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* tensor) {
      auto* allocation = static_cast<Allocation*>(tensor->manager_ctx);
      fake::run_on(allocation->stream, [allocation] { delete allocation; });
    };
    managed.dl_tensor = {data, device, 1, {kDLUInt, 8, 1}, &this->bytes, nullptr, 0};
  }
};

inline int allocate(DLTensor* wanted, DLManagedTensorVersioned** out, void* context,
                    void (*set_error)(void*, const char*, const char*)) {
  if (fake::fails(fake::kAllocation)) {
    set_error(context, "RuntimeError", "out of the fake GPU's memory");
    return -1;
  }
  require(wanted->ndim == 1 && wanted->dtype.bits == 8, "memory in bytes is asked for");
  *out = &(new Allocation(wanted->shape[0], wanted->device))->managed;
  return 0;
}

using Resolved = Tuple<Bytes, Array<String>, Array<int64_t>>;

inline Resolved resolve(String op, Array<String> names, Array<int64_t> values, int64_t) {
  require(names.size() == 5 && values.size() == 5, "pair copies are asked for");
  std::string image;
  for (const int64_t value : values) image += std::to_string(value) + " ";
  const int64_t large = values[4];
  return Resolved(Bytes(image), Array<String>{op},
                  Array<int64_t>{large ? 1024 : 256, 0, large ? 8 : 1, 1});
}

inline void write_item(char* items, int item_bytes, i64 i, i64 value) {
  const auto narrow = static_cast<int32_t>(value);
  std::memcpy(items + i * item_bytes, item_bytes == 4 ? static_cast<const void*>(&narrow) : &value,
              static_cast<size_t>(item_bytes));
}

// Has the module find the fake GPU's kernels and memory. To be called once.
inline void set_up() {
  TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 1, nullptr);
  set_resolver()(Function::FromTyped(resolve));
}

// The stream that this thread's calls on its device go to.
inline void use_stream(CUstream stream) {
  TVMFFIEnvSetStream(kDLCUDA, fake::device_of(stream), stream, nullptr);
}

struct Shape {
  i64 row_bytes = 656;
  i64 num_pairs = 1000;
  int index_bytes = 8;
  int device = 0;
};

// Tables, pairs of random rows with padding between them, and what is in them after a copy.
class Tables {
 public:
  Tables(const Shape& shape, CUstream stream)
      : shape(shape),
        stream(stream),
        num_src_rows(shape.num_pairs + 5),
        num_dst_rows(shape.num_pairs + 3),
        pairs_(2 * shape.num_pairs * shape.index_bytes, Memory::kPageable) {
    src_ = new Memory(num_src_rows * shape.row_bytes, Memory::kPinned, shape.device);
    dst_ = new Memory(num_dst_rows * shape.row_bytes, Memory::kDevice, shape.device);
    fill(*src_, num_src_rows, 1);
    fill(*dst_, num_dst_rows, 2);
    before_.assign(dst_->data(), dst_->data() + dst_->bytes());
    expected_ = before_;
    for (i64 i = 0; i < shape.num_pairs; ++i) {
      const i64 src_row = mixed(i, shape.num_pairs) % num_src_rows;
      const i64 dst_row = shuffled(i, num_dst_rows, 3);
      const i64 kind = mixed(i, 7) % 16;
      const i64 lowest = shape.index_bytes == 4 ? INT32_MIN : INT64_MIN;
      const i64 padding = i % 3 != 0 ? -1 : lowest;
      write_item(pairs_.data(), shape.index_bytes, 2 * i, kind < 2 ? padding : src_row);
      write_item(pairs_.data(), shape.index_bytes, 2 * i + 1,
                 kind == 0 || kind == 2 ? padding : dst_row);
      if (kind < 3) continue;
      std::memcpy(row_of(expected_.data(), dst_row), row_of(src_->data(), src_row),
                  static_cast<size_t>(shape.row_bytes));
    }
  }
  // Behind all that is queued on the stream.
  ~Tables() {
    fake::run_on(stream, [dst = dst_] { delete dst; });
    fake::synchronize(stream);  // SMs may read it until then
    delete src_;
  }
  // The call. What it throws is a tvm::ffi::Error.
  void run() {
    const DLDevice host{kDLCPU, 0};
    const DLDevice gpu{kDLCUDA, shape.device};
    const auto int_type = [](int bytes) { return DLDataType{kDLInt, uint8_t(8 * bytes), 1}; };
    int64_t src_shape[] = {num_src_rows, shape.row_bytes};
    int64_t dst_shape[] = {num_dst_rows, shape.row_bytes};
    int64_t pairs_shape[] = {shape.num_pairs, 2};
    int64_t strides[] = {shape.row_bytes, 1};
    const DLDataType bytes{kDLUInt, 8, 1};
    DLTensor src{src_->data(), host, 2, bytes, src_shape, strides, 0};
    DLTensor dst{dst_->data(), gpu, 2, bytes, dst_shape, strides, 0};
    DLTensor pairs{pairs_.data(), host, 2, int_type(shape.index_bytes), pairs_shape, nullptr, 0};
    use_stream(stream);
    h2d_gather()(&src, &dst, &pairs, nullptr, false, nullptr, String("given"), String("auto"));
  }
  // The same; the kind of the error and its text, "": none.
  std::string try_run() {
    try {
      run();
      return "";
    } catch (const tvm::ffi::Error& error) {
      return error.kind() + ": " + error.message();
    }
  }
  // Waits for the call's stream, no other; all has to be as expected.
  void check(const std::string& what) {
    fake::synchronize(stream);
    require(fake::num_faults() == 0, what + ": the GPU was given rows out of range");
    const std::string_view found(dst_->data(), expected_.size());
    const auto wrong = std::mismatch(found.begin(), found.end(), expected_.begin()).first;
    require(wrong == found.end(),
            what + ": row " + std::to_string((wrong - found.begin()) / shape.row_bytes));
  }
  i64 pair_item(i64 i) const {
    return shape.index_bytes == 4 ? items<int32_t>()[i] : items<i64>()[i];
  }
  // Atomic, as another thread's.
  void set_pair_item(i64 i, i64 value) {
    if (shape.index_bytes == 4) {
      __atomic_store_n(items<int32_t>() + i, static_cast<int32_t>(value), __ATOMIC_RELAXED);
    } else {
      __atomic_store_n(items<i64>() + i, value, __ATOMIC_RELAXED);
    }
  }
  // Of a pair that the call has not come to: its row stays as it is.
  void spoil_pair(i64 i, i64 src_row, i64 dst_row) {
    if (const i64 row = pair_item(2 * i + 1); row >= 0) {
      std::memcpy(&expected_[row * shape.row_bytes], &before_[row * shape.row_bytes],
                  static_cast<size_t>(shape.row_bytes));
    }
    set_pair_item(2 * i, src_row);
    set_pair_item(2 * i + 1, dst_row);
  }

  const Shape shape;
  const CUstream stream;
  const i64 num_src_rows;
  const i64 num_dst_rows;

 private:
  void fill(Memory& table, i64 num_rows, i64 seed) {
    std::memset(table.data(), 0x77, static_cast<size_t>(table.bytes()));
    std::vector<i64> words(static_cast<size_t>(shape.row_bytes / 8 + 1));
    for (i64 row = 0; row < num_rows; ++row) {
      for (size_t k = 0; k < words.size(); ++k) words[k] = mixed(row + 1, seed + 4 * i64(k));
      std::memcpy(row_of(table.data(), row), words.data(), static_cast<size_t>(shape.row_bytes));
    }
  }
  char* row_of(char* table, i64 row) const { return table + row * shape.row_bytes; }
  template <class Index>
  Index* items() const {
    return reinterpret_cast<Index*>(pairs_.data());
  }

  Memory* src_;
  Memory* dst_;
  Memory pairs_;
  std::vector<char> before_;
  std::vector<char> expected_;
};

}  // namespace calls
