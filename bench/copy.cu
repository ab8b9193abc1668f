// The ceiling that memory kernels are measured against: a contiguous copy in 16-byte vectors. One
// vector a thread is fastest on an H200 (4.29 TB/s read + write; with four a thread 4.09).
#include <jitkern/types.h>

namespace jitkern {

template <int kThreads>
struct CopyKernel {
  struct Params {
    uint4* dst;
    const uint4* src;
    i64 num_vecs;
  };
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params& p) {
    const i64 at = i64(blockIdx.x) * kThreads + threadIdx.x;
    if (at < p.num_vecs) p.dst[at] = p.src[at];
  }
};

}  // namespace jitkern
