// write_twice on the device: row i of the input goes to rows 2 i and 2 i + 1 of the output.
#include <jitkern/copy.cuh>

#include "twice.h"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, bool kUsePdl, int kVecBytes,
          int kInFlight>
struct TwiceKernel {
  using Params = TwiceParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    using Rows = Group<kRowBytes, kVecBytes, kInFlight>;
    const Rows group(thread_number());
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 row = group.first_row + r;
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c);
        if (row >= p.num_rows || offset >= kRowBytes) continue;
        const auto value = load_vec<kVecBytes>(p.rows + row * p.row_stride_bytes + offset);
        for (i64 copy = 0; copy < 2; ++copy) {
          store_vec<kVecBytes>(p.output + (2 * row + copy) * p.output_stride_bytes + offset, value);
        }
      }
    }
  }
};

}  // namespace jitkern
