// The ceiling that memory kernels are measured against: a contiguous copy in 16-byte vectors. One
// vector a thread is fastest on an H200 (4.29 TB/s read + write; with four a thread 4.09). If a
// conversion reads and writes different numbers of bytes, up to 2:1, the first threads read or
// write a second vector.
#include <jitkern/types.h>

namespace jitkern {

template <int kThreads>
struct CopyKernel {
  struct Params {
    uint4* dst;
    const uint4* src;
    i64 num_written;
    i64 num_read;
  };
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params& p) {
    const i64 num_vecs = p.num_read < p.num_written ? p.num_read : p.num_written;
    const i64 at = i64(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= num_vecs) return;
    uint4 vec = p.src[at];
    if (num_vecs + at < p.num_read) {
      const uint4 second = p.src[num_vecs + at];
      vec = {vec.x ^ second.x, vec.y ^ second.y, vec.z ^ second.z, vec.w ^ second.w};
    }
    p.dst[at] = vec;
    if (num_vecs + at < p.num_written) p.dst[num_vecs + at] = vec;
  }
};

}  // namespace jitkern
