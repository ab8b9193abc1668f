// What the drivers of sorted calls share: the memory of regions, and launches.
#pragma once

#include "ops/sort.cuh"

#include "pairs.h"

namespace emulate {

constexpr i64 kUntouched = -9;  // where no entry was written

// Exactly the counters of a call's regions, which start as all ones, and what is made of them.
struct RegionBuffers {
  int shift;
  AlignedWords last_ranks, starts;

  // Regions of the smallest size that `span_bytes` allow, or of a few times that.
  RegionBuffers(i64 span_bytes, Random& random)
      : shift(0), last_ranks(kNumRegions, 0xffffffffu), starts(kNumRegions, 0x99999999u) {
    while ((span_bytes - 1) >> shift >= i64(kNumRegions)) ++shift;
    shift += static_cast<int>(random.below(4));
  }

  Regions regions(u32* last_entry) { return {last_ranks.data(), starts.data(), last_entry, shift}; }
};

// Another stream writes the pairs between two kernels: nothing is written outside of the lists.
template <class Int>
void rewrite(IntBuffer& pairs, i64 src_rows, i64 dst_rows, Random& random) {
  auto* now = static_cast<Int*>(pairs.data());
  for (i64 i = 0; i < pairs.size(); ++i) {
    const i64 last = (i % 2 == 0 ? src_rows : dst_rows) - 1;
    now[i] = static_cast<Int>(random.below(3) == 0 ? -5 : last);
  }
}

// A thread a row.
template <class Kernel>
void run_list(i64 num_rows, const typename Kernel::Params& params, Random& random) {
  launch_fibers({ceil_div(num_rows, Kernel::kNumThreads)}, {Kernel::kNumThreads}, any_order(random),
                [&] { Kernel::run(params); });
}

inline i64 table_size_for(i64 num_pairs) {
  i64 size = 2;
  while (size < 2 * num_pairs) size *= 2;
  return size;
}

inline void scan(const Regions& regions, Random& random) {
  using Scan = ScanRegions<kScanConfig.num_threads, 1>;
  launch_fibers({1}, {Scan::kNumThreads}, any_order(random), [&] { Scan::run(regions); });
}

}  // namespace emulate
