// Peers that jitkern launches: an empty kernel and the plain way to unpack.
#include <jitkern/copy.cuh>

namespace peer {

using jitkern::i64;

// The floor of a launch. Its parameters are as large as those of store_cache.
struct Empty {
  struct Params {
    i64 words[11];
  };
  static constexpr int kNumThreads = 128;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params&) {}
};

// A block a descriptor, by vectors as wide as its numbers allow, which are bytes if one is odd.
// Descriptors are rows of 3 int64.
struct Pieces {
  struct Params {
    char* dst;
    const char* src;
    const long long* descriptors;
  };
  static constexpr int kNumThreads = 256;
  static constexpr int kMinBlocks = 8;

  static __device__ void run(const Params& p) {
    const i64* row = p.descriptors + i64(blockIdx.x) * 3;
    const i64 src_off = row[0], dst_off = row[1], len = row[2], bits = src_off | dst_off | len;
    const char* src = p.src + src_off;
    char* dst = p.dst + dst_off;
    if (bits % 16 == 0) return copy<16>(dst, src, len);
    if (bits % 8 == 0) return copy<8>(dst, src, len);
    if (bits % 4 == 0) return copy<4>(dst, src, len);
    copy<1>(dst, src, len);
  }

 private:
  template <int kBytes>
  static __device__ void copy(char* dst, const char* src, i64 len) {
    for (i64 at = threadIdx.x * kBytes; at < len; at += kNumThreads * kBytes) {
      jitkern::store_vec<kBytes>(dst + at, jitkern::load_vec<kBytes>(src + at));
    }
  }
};

}  // namespace peer
