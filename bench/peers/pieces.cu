// The plain way to unpack: a block a descriptor, by vectors as wide as its numbers allow, which are
// bytes where one is odd. Descriptors are rows of 3 or 6 int64.
#include <jitkern/copy.cuh>

namespace peer {

using jitkern::i64;

struct Pieces {
  struct Params {
    char* dst;
    const char* src;
    const long long* descriptors;
    int words;
  };
  static constexpr int kNumThreads = 256;
  static constexpr int kMinBlocks = 8;

  static __device__ void run(const Params& p) {
    const i64* row = p.descriptors + i64(blockIdx.x) * p.words;
    const i64 src_off = row[0], dst_off = row[1], len = row[2];
    const i64 count = p.words == 6 ? row[3] : 1;
    const i64 src_stride = p.words == 6 ? row[4] : 0, dst_stride = p.words == 6 ? row[5] : 0;
    const i64 bits = src_off | dst_off | len | src_stride | dst_stride;
    const char* src = p.src + src_off;
    char* dst = p.dst + dst_off;
    if (bits % 16 == 0) return copy<16>(dst, src, len, count, dst_stride, src_stride);
    if (bits % 8 == 0) return copy<8>(dst, src, len, count, dst_stride, src_stride);
    if (bits % 4 == 0) return copy<4>(dst, src, len, count, dst_stride, src_stride);
    copy<1>(dst, src, len, count, dst_stride, src_stride);
  }

 private:
  template <int kBytes>
  static __device__ void copy(char* dst, const char* src, i64 len, i64 count, i64 dst_stride,
                              i64 src_stride) {
    const i64 vecs = len / kBytes;
    for (i64 i = threadIdx.x; i < vecs * count; i += kNumThreads) {
      const i64 piece = count == 1 ? 0 : i / vecs;
      const i64 at = (i - piece * vecs) * kBytes;
      jitkern::store_vec<kBytes>(dst + piece * dst_stride + at,
                                 jitkern::load_vec<kBytes>(src + piece * src_stride + at));
    }
  }
};

}  // namespace peer
