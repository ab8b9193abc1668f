// The ceiling that memory kernels are measured against: a contiguous copy in 16-byte vectors.
#include <jitkern/types.h>

namespace jitkern {

template <int kThreads, int kUnroll>
struct CopyKernel {
  struct Params {
    uint4* dst;
    const uint4* src;
    i64 num_vecs;
  };
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params& p) {
    const i64 first = i64(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
    uint4 value[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const i64 at = first + j * kThreads;
      if (at < p.num_vecs) value[j] = __ldcs(p.src + at);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const i64 at = first + j * kThreads;
      if (at < p.num_vecs) p.dst[at] = value[j];
    }
  }
};

}  // namespace jitkern
