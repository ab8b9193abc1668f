// Types that cross from host to device. Compiled by NVRTC too, so no standard header is included.
#pragma once

#ifdef __CUDACC__
#define JITKERN_HOST_DEVICE __host__ __device__
#else
#define JITKERN_HOST_DEVICE
#endif

namespace jitkern {

using i32 = int;
using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void*) == 8, "a 64-bit platform");

// Which index argument of which op a fault came from: the number that fault_site() gave to its
// names, which an op's parameters carry to the kernel.
enum class FaultSite : u32 {};

// The first out-of-range index a device met: pinned host memory that kernels write and the host
// reads without a synchronisation. `state` goes 0 (empty) -> 1 (being written) -> 2 (complete).
struct FaultRecord {
  u32 state;
  FaultSite site;
  i64 position;  // of the index in its argument, flattened
  i64 value;
  i64 bound;  // the first value that is too large
};

}  // namespace jitkern
