// What several ops share on the host: checks of arguments, scratch memory, uploads.
#pragma once

#include <jitkern/launch.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <optional>

#include "host/staging.h"

namespace jitkern {

// Which of `choices` the string `value` is; None is the first, "auto". TypeError or ValueError on
// anything else.
int choice_arg(const char* op, const char* arg, AnyView value,
               std::initializer_list<const char*> choices);

// How many SMs a caller allows, or none. TypeError or ValueError on anything else.
std::optional<i64> num_sms_arg(const char* op, AnyView value);

// ValueError unless `host` is in host memory. If the two are swapped it names their right `order`.
void require_host_memory(const Rows& host, const Rows& device, const char* order);

// ValueError unless the last dimension is `size`: "shape [..., `size`] of (`what`)".
void require_last_dim(const Indices& indices, i64 size, const char* what);

// The memory [begin, end) of a tensor as one row.
Rows as_one_row(const Tensor& tensor, u64 begin, u64 end);

// How many entries of a list count: 1 element on the list's device, or None: all.
struct CountArg {
  std::optional<Indices> indices;

  CountArg() = default;
  CountArg(const char* op, AnyView value, const Indices& list);
  void apart_from(const Rows& written) const {
    if (indices) indices->apart_from(written);
  }
  // Of `size` entries, on the CPU.
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

// From torch's caching allocator.
inline tvm::ffi::Tensor allocate_bytes(i64 bytes, DLDevice device) {
  return allocate({bytes}, DLDataType{kDLUInt, 8, 1}, device);
}

// Copies `count` items to new device memory, through pinned memory: `write(block, begin, count)`
// writes items from number `begin` on. Compile kernels before: this holds a lock.
template <class Write>
tvm::ffi::Tensor upload(const LaunchScope& scope, i64 count, i64 item_bytes, const Write& write) {
  const RelaxedCapture relaxed;
  Staging& staging = Staging::get(scope);
  const std::lock_guard<std::mutex> turn(staging.turn);
  const auto memory = allocate_bytes(count * item_bytes, {kDLCUDA, scope.device.ordinal});
  const i64 most = Uploads::kBytes / 2 / item_bytes;
  for (i64 begin = 0; begin < count; begin += most) {
    const i64 here = std::min(most, count - begin);
    char* const block = staging.uploads.take(here * item_bytes);
    write(block, begin, here);
    copy_to_device(static_cast<char*>(memory.data_ptr()) + begin * item_bytes, block,
                   here * item_bytes, scope.stream());
    staging.uploads.mark(scope.stream());
  }
  return memory;
}

}  // namespace jitkern
