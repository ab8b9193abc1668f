// What several ops share on the host: checks of arguments, scratch memory, uploads.
#pragma once

#include <jitkern/launch.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache_rows.h"
#include "host/staging.h"

namespace jitkern {

// The number of the choice that `value` names; None is 0. TypeError or ValueError on anything else.
int choice_arg(const char* op, const char* arg, AnyView value,
               std::initializer_list<const char*> choices);

// The most SMs that the caller allows, or none. TypeError or ValueError on anything else.
std::optional<i64> num_sms_arg(const char* op, AnyView value);

// ValueError unless `host` is in host memory. It names the right `order` if the two are swapped.
void require_host_memory(const Rows& host, const Rows& device, const char* order);

// The address of rows as the GPU has it. ValueError if they are in host memory that is not pinned.
char* address_on_gpu(const Rows& rows);

// ValueError unless the last dimension is `size`: "shape [..., `size`] of (`what`)", and `note`.
void require_last_dim(const Tensor& indices, i64 size, const char* what, const char* note = "");

// "partials[0]", "partials[1]", ... for `arg` "partials".
std::vector<std::string> item_names(const char* arg, int count);

// The tensor's FloatType; float8_e4m3fn only `with_fp8`. TypeError for any other dtype.
int float_type(const Tensor& tensor, bool with_fp8 = false);

// A tensor as rows of bytes [outer, inner], such as [tokens, heads], at any strides.
struct Grid : Tensor {
  char* data;
  i64 outer;
  i64 inner;
  i64 outer_stride;  // in bytes; 0 if the dimension is 1
  i64 inner_stride;
  i64 row_bytes;
  u64 begin;  // address of the first byte, unless it is empty
  u64 end;    // after the last

  // A row is the dimensions from `row_dim` on. ValueError unless rows are contiguous, and if a
  // stride is negative.
  Grid(const Tensor& tensor, int outer_dim, int inner_dim, int row_dim);

  bool empty() const { return outer == 0 || inner == 0 || row_bytes == 0; }
  char* row(i64 i, i64 j) const { return data + i * outer_stride + j * inner_stride; }
  u64 stride_bits() const { return static_cast<u64>(outer_stride | inner_stride); }
  // The same grid, `bytes` further on.
  Grid moved_by(i64 bytes) const;
  bool is_same_place_as(const Grid& other) const;
  // ValueError if two rows share bytes; for tensors that the op writes.
  void distinct_rows() const;
  // ValueError if a row shares a byte with a row of `other`.
  void apart_from(const Grid& other, const char* expected = kOwnMemory) const;
  // All of its memory as one row.
  Rows whole() const;
  // The first row's address as the GPU has it.
  char* on_gpu() const;

 private:
  Lattice lattice() const {
    return Lattice(begin, row_bytes, {{{outer, outer_stride}, {inner, inner_stride}, {1, 0}}});
  }
};

// The number of entries of a list that are used: 1 element on the list's device, or None for all.
struct CountArg {
  std::optional<Indices> indices;

  CountArg() = default;
  CountArg(const char* op, AnyView value, const Indices& list);
  void apart_from(const Rows& written) const {
    if (indices) indices->apart_from(written);
  }
  // The count, 0 to `size`. On the CPU.
  i64 read(i64 size) const;
  // Sets `count` and `count_bytes` of a kernel's parameters if it is on the GPU.
  template <class Params>
  void give_to(Params& params) const {
    if (!indices || !indices->on_cuda()) return;
    params.count = indices->data;
    params.count_bytes = indices->index_bytes;
  }
};

// ValueError while a graph is captured: a replay would not read `host_list` again.
void require_no_capture(const LaunchScope& scope, const Indices& host_list,
                        const std::string& expected);

inline tvm::ffi::Tensor allocate_bytes(i64 bytes, DLDevice device) {
  return allocate({bytes}, DLDataType{kDLUInt, 8, 1}, device);
}

// Copies `count` items to new device memory. `write(block, begin, count)` writes the items from
// `begin` on to pinned memory. Compile kernels before the call, which holds a lock.
template <class Write>
tvm::ffi::Tensor upload(const LaunchScope& scope, i64 count, i64 item_bytes, const Write& write) {
  // In torch's own capture mode: while another thread captures in mode "global", it raises.
  const auto memory = allocate_bytes(count * item_bytes, {kDLCUDA, scope.device.ordinal});
  const RelaxedCapture relaxed;
  Uploads& uploads = Uploads::get(scope);
  const std::lock_guard<std::mutex> lock(uploads.mutex);
  const i64 most = Uploads::kBytes / 2 / item_bytes;
  for (i64 begin = 0; begin < count; begin += most) {
    const i64 here = std::min(most, count - begin);
    char* const block = uploads.take(here * item_bytes);
    write(block, begin, here);
    copy_to_device(static_cast<char*>(memory.data_ptr()) + begin * item_bytes, block,
                   here * item_bytes, scope.stream());
    uploads.mark(scope.stream());
  }
  return memory;
}

}  // namespace jitkern
