// What the drivers of calls on pairs, and on the triples of swap_rows, share: the faults to expect,
// and the parameters of a call.
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

// Triples of swap_rows, and what a call leaves behind.

constexpr FaultSite kFetchSite{5};
constexpr FaultSite kSlotSite{6};
constexpr FaultSite kBackSite{7};
constexpr i64 kFirstPosition = 1000;

// Rows that are written back to are distinct, and fetched by no other triple.
inline std::vector<i64> any_triples(i64 count, i64 host_rows, i64 slots, int index_bytes,
                                    Random& random) {
  const std::vector<i64> rows = random.distinct(2 * count, host_rows);
  std::vector<i64> fetch(rows.begin(), rows.begin() + count);
  std::vector<i64> back(rows.begin() + count, rows.end());
  std::vector<i64> slot = random.distinct(count, slots);
  const i64 kind = random.below(4);
  for (i64 i = 0; i < count; ++i) {
    const i64 dice = random.below(5);
    if (kind == 1 || dice == 0) back[i] = fetch[i];
    if (kind == 2 && dice == 1) fetch[i] = rows[random.below(count)];
    if (kind != 3 && dice == 2) fetch[i] = -1;
    if (kind != 3 && dice == 3) back[i] = -1;
  }
  // A row that is fetched again may be one of an exchange: there it is fetched only.
  if (kind == 2) {
    for (i64 i = 0; i < count; ++i) {
      if (fetch[i] >= 0 && back[i] == fetch[i]) back[i] = -1;
      for (i64 j = 0; j < count; ++j) {
        if (j != i && back[j] >= 0 && back[j] == fetch[i]) back[j] = -1;
      }
    }
  }
  if (random.below(3) == 0) spoil(fetch, host_rows, index_bytes, random);
  if (random.below(3) == 0) spoil(slot, slots, index_bytes, random);
  if (random.below(3) == 0) spoil(back, host_rows, index_bytes, random);
  std::vector<i64> flat;
  for (i64 i = 0; i < count; ++i) flat.insert(flat.end(), {fetch[i], slot[i], back[i]});
  return flat;
}

// Swaps the expected rows, and expects the faults.
inline void expect_swaps(const IntBuffer& triples, RowBuffer& host, RowBuffer& gpu,
                         FaultWord& fault) {
  const i64 host_rows = host.num_rows(), slots = gpu.num_rows(), row_bytes = host.row_bytes();
  for (i64 i = 0; i < triples.size() / 3; ++i) {
    const i64 fetch = triples.at(3 * i);
    const i64 slot = triples.at(3 * i + 1);
    const i64 back = triples.at(3 * i + 2);
    if (slot < 0) continue;
    const i64 position = kFirstPosition + i;
    if (fetch >= host_rows) {
      fault.expect(kFetchSite, position, fetch, host_rows);
    } else if (slot >= slots) {
      fault.expect(kSlotSite, position, slot, slots);
    } else if (back >= host_rows) {
      fault.expect(kBackSite, position, back, host_rows);
    } else {
      if (back >= 0) std::memcpy(host.expected(back), gpu.row(slot), row_bytes);
      if (fetch >= 0) std::memcpy(gpu.expected(slot), host.row(fetch), row_bytes);
    }
  }
}

inline SwapParams swap_params(const IntBuffer& triples, RowBuffer& host, RowBuffer& gpu,
                              FaultWord& fault) {
  SwapParams params{};
  params.host = host.row(0);
  params.gpu = gpu.row(0);
  params.host_stride_bytes = host.stride_bytes();
  params.gpu_stride_bytes = gpu.stride_bytes();
  params.triples = triples.data();
  params.num_triples = triples.size() / 3;
  params.first_position = kFirstPosition;
  params.num_host_rows = host.num_rows();
  params.num_slots = gpu.num_rows();
  params.fetch_site = kFetchSite;
  params.slot_site = kSlotSite;
  params.back_site = kBackSite;
  params.fault = fault.record();
  return params;
}

}  // namespace emulate
