// Parts of kernels that move rows: vectors of 1 to 16 bytes, a thread's share of the rows, and
// faults. Users may include it.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

template <int kBytes>
__device__ constexpr auto any_vec() {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 1) return static_cast<unsigned char>(0);
  if constexpr (kBytes == 2) return static_cast<unsigned short>(0);
  if constexpr (kBytes == 4) return 0u;
  if constexpr (kBytes == 8) return uint2{};
  if constexpr (kBytes == 16) return uint4{};
}
template <int kBytes>
using Vec = decltype(any_vec<kBytes>());

template <int kBytes>
__device__ constexpr auto any_index() {
  if constexpr (kBytes == 4) return i32(0);
  if constexpr (kBytes == 8) return i64(0);
}
template <int kBytes>
using Index = decltype(any_index<kBytes>());

template <int kBytes>
__device__ inline Vec<kBytes> load_vec(const char* address) {
  return *reinterpret_cast<const Vec<kBytes>*>(address);
}

template <int kBytes>
__device__ inline void store_vec(char* address, Vec<kBytes> value) {
  *reinterpret_cast<Vec<kBytes>*>(address) = value;
}

// The rows that this thread's group works on.
template <i64 kRowBytes, int kVecBytes, int kInFlight, int kSplits = 1>
struct Group {
  static_assert(kRowBytes < (1ll << 31), "offsets inside a row are 32-bit");
  static constexpr GroupShape kShape = group_shape(kRowBytes, kVecBytes, kInFlight, kSplits);
  static constexpr int kRows = kShape.rows;
  static constexpr int kChunks = kShape.chunks;

  i64 first_row;
  i32 first_offset;

  __device__ explicit Group(i64 thread) {
    const i64 group = thread / kShape.lanes;
    const i32 split = static_cast<i32>(group % kShape.splits);
    const i32 lane = static_cast<i32>(thread % kShape.lanes);
    first_row = group / kShape.splits * kRows;
    first_offset = (split * kChunks * kShape.lanes + lane) * kVecBytes;
  }

  // Whether this thread reports faults for its group's rows.
  __device__ bool reports() const { return first_offset == 0; }

  // The byte offset in a row of this lane's vector `chunk`; may be past the end of the row.
  __device__ i32 offset(int chunk) const {
    return first_offset + chunk * (kShape.lanes * kVecBytes);
  }
};

__device__ inline i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

// Records a fault unless the record is full; the host raises it later and empties the record. The
// plain read keeps a batch of bad indices from sending an atomic each over PCIe. Over PCIe the
// compare-and-swap is atomic only among threads of this device. That is enough, as the host only
// turns 2 into 0.
__device__ inline void report_fault(FaultRecord* record, FaultSite site, i64 position, i64 value,
                                    i64 bound) {
  volatile FaultRecord* seen = record;
  if (seen->state != 0 || atomicCAS(&record->state, 0u, 1u) != 0u) return;
  seen->site = site;
  seen->position = position;
  seen->value = value;
  seen->bound = bound;
  __threadfence_system();
  seen->state = 2;
}

}  // namespace jitkern
