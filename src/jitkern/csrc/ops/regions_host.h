// Calls in the order of the host's memory: when they pay, and what sorting their rows takes.
#pragma once

#include <jitkern/launch.h>

#include "regions.h"

namespace jitkern {

// What a call moves over the link.
struct HostTraffic {
  int ordinal;  // of the GPU, -1: none
  i64 num_rows;
  i64 row_bytes;
  i64 span_bytes;  // of the host's rows, from the first to the last; below 1 where these lie
                   // backwards or there are none: such rows have no order to be brought in
};

// Whether the order pays: for many short rows of more memory than the link's translation reaches.
bool is_worth_ordering(const HostTraffic& traffic);

// Whether a call moves its rows in the order of the host's memory: "host" yes, "given" no, "auto"
// or None if it pays. TypeError or ValueError on anything else.
bool order_arg(const char* op, AnyView order, const HostTraffic& traffic);

// What a sorted call has on its way by default, but at least `unsorted`, what another one has.
i64 ordered_bytes_in_flight(const HostTraffic& traffic, i64 unsorted);

// Entry points of a module that sorts.
enum SortEntry : int { kListEntry, kScanEntry, kPlaceEntry };

// The regions of a span of host memory, to be given memory.
Regions cut_regions(i64 span_bytes, u32 num_kinds = 1);

// Launches a kernel on as many threads.
template <class Params>
void launch_threads(const LaunchScope& scope, const Kernel& kernel, i64 num_threads,
                    const Params& params) {
  scope.launch(kernel, ceil_div(num_threads, kernel.num_threads), params);
}

// Sums up the regions, between the kernel that numbers `num_rows` and the one that places them.
template <class Params>
void launch_sort(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                 const Params& params) {
  launch_threads(scope, kernels.entries[kListEntry], num_rows, params);
  scope.launch(kernels.entries[kScanEntry], 1, params.regions);
  launch_threads(scope, kernels.entries[kPlaceEntry], num_rows, params);
}

// Scratch memory of a call, cut into pieces of whole 16 bytes.
class Scratch {
 public:
  // Where the next piece begins.
  i64 add(i64 bytes) {
    const i64 at = bytes_;
    bytes_ += ceil_div(bytes, 16) * 16;
    return at;
  }
  i64 bytes() const { return bytes_; }
  // From torch's caching allocator.
  tvm::ffi::Tensor allocate_on(DLDevice device) const {
    return allocate({bytes_}, DLDataType{kDLUInt, 8, 1}, device);
  }

 private:
  i64 bytes_ = 0;
};

}  // namespace jitkern
