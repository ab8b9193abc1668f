#pragma once

#include <jitkern/launch.h>

#include "ops/pairs.h"

namespace fake {

// What a kernel was compiled for.
struct KernelSpec {
  int row_bytes, vec_bytes, index_bytes, line_aligned, large, host_side;
};

// Ends the program where the parameters are not what the kernel was compiled for.
void require_launch(const KernelSpec& spec, const jitkern::LaunchConfig& config,
                    const jitkern::PairCopyParams& params);
void copy_pairs(const KernelSpec& spec, const jitkern::PairCopyParams& params);

}  // namespace fake
