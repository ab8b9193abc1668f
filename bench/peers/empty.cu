// A kernel that does nothing: the floor of a launch. Its parameters are as large as an op's.
#include <jitkern/types.h>

namespace peer {

struct EmptyKernel {
  struct Params {
    jitkern::i64 words[11];  // 88 bytes, what store_cache's parameters take
  };
  static constexpr int kNumThreads = 128;
  static constexpr int kMinBlocks = 1;

  static __device__ void run(const Params&) {}
};

}  // namespace peer
