// Shared by the drivers of calls on pairs: expected faults, and the parameters of a call.
#pragma once

#include "ops/pairs.h"

#include "sweep.h"

namespace emulate {

constexpr FaultSite kSrcSite{5}, kDstSite{6};

// Whether a pair is of rows to copy; one that is out of range may be the fault.
inline bool expect_pair(FaultWord& fault, i64 position, i64 source, i64 target, i64 src_rows,
                        i64 dst_rows) {
  if (source < 0 || target < 0) return false;
  if (source >= src_rows) {
    fault.expect(kSrcSite, position, source, src_rows);
  } else if (target >= dst_rows) {
    fault.expect(kDstSite, position, target, dst_rows);
  }
  return source < src_rows && target < dst_rows;
}

inline PairCopyParams pair_params(RowBuffer& dst, RowBuffer& src, IntBuffer& pairs,
                                  FaultWord& fault) {
  PairCopyParams params{};
  params.dst = dst.row(0);
  params.src = src.row(0);
  params.dst_stride_bytes = dst.stride_bytes();
  params.src_stride_bytes = src.stride_bytes();
  params.pairs = pairs.data();
  params.num_pairs = pairs.size() / 2;
  params.num_src_rows = src.num_rows();
  params.num_dst_rows = dst.num_rows();
  params.src_site = kSrcSite;
  params.dst_site = kDstSite;
  params.fault = fault.record();
  return params;
}

}  // namespace emulate
