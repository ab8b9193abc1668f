// indexing of a table in pinned host memory, large calls: the indices become pairs of rows, which
// are fetched as those of h2d_gather are, each row once and in the order of a large table.
#include "index.h"
#include "pairs.cuh"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using TableFetch = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes,
                            kLineAligned, kLarge, kInFlight, kHostSource>;

// Pair i is the row of index i in the table and row i of the output. Where the index is outside of
// the table it is padding, and the output's row is zeros by the end of this kernel.
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kThreads, int kMaxOccupancy>
struct PairsOfIndices {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  using Params = IndexPairsParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    const bool is_asked = number < p.num_rows;
    const i64 index = is_asked ? i64(static_cast<const Int*>(p.indices)[number]) : 0;
    const i64 row = table_row(p, index);
    const bool inside = row >= 0;
    if (is_asked) {
      Int* pair = static_cast<Int*>(p.pairs) + 2 * number;
      pair[0] = inside ? static_cast<Int>(row) : Int(-1);
      pair[1] = inside ? static_cast<Int>(number) : Int(-1);
      if (index > p.last_index) {
        report_fault(p.fault, p.indices_site, number, index, p.last_index + 1);
      }
    }
    // A warp writes the zeros of each of its rows together.
    const i64 lane = threadIdx.x % 32;
    u32 outside = __ballot_sync(0xffffffffu, is_asked && !inside);
    for (; outside != 0; outside &= outside - 1) {
      const i64 zero_row = number - lane + (__ffs(static_cast<i32>(outside)) - 1);
      char* target = p.output + zero_row * p.output_stride_bytes;
      for (i64 at = lane * kVecBytes; at < kRowBytes; at += 32 * kVecBytes) {
        store_vec<kVecBytes>(target + at, Vec<kVecBytes>{});
      }
    }
  }
};

}  // namespace jitkern
