// Dequantises rows of int8 with a scale per row: out[row][i] = x[row][i] * scale[row].
//
// Device code only: DeviceModule.launch launches it. Params are its arguments, in order.
#include <jitkern/pdl.cuh>

template <int kDim, int kThreads, int kBlocksPerSm, bool kUsePdl>
struct Dequantise {
  static_assert(kDim % 4 == 0, "a row is whole vectors of 4 values");

  struct Params {
    const signed char* x;
    const float* scale;
    float* out;
    long long rows;
  };
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kBlocksPerSm;

  static __device__ void run(const Params& p) {
    jitkern::wait_for_earlier_kernels<kUsePdl>();  // one of them may have written x
    constexpr int kVectors = kDim / 4;
    const long long step = (long long)gridDim.x * kThreads;
    long long i = (long long)blockIdx.x * kThreads + threadIdx.x;
    for (; i < p.rows * kVectors; i += step) {
      const char4 x = reinterpret_cast<const char4*>(p.x)[i];
      const float scale = p.scale[i / kVectors];
      reinterpret_cast<float4*>(p.out)[i] =
          make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    }
  }
};
