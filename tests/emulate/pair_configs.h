// How the kernels of the ops on pairs are launched, as their Python says.
#pragma once

namespace emulate {

struct Config {
  int num_threads, max_occupancy;
  bool use_pdl;
};
constexpr Config kSmallConfig{PAIRS_SMALL_CONFIG}, kLargeConfig{PAIRS_LARGE_CONFIG};
constexpr Config kListConfig{PAIRS_LIST_CONFIG}, kScanConfig{PAIRS_SCAN_CONFIG};

}  // namespace emulate
