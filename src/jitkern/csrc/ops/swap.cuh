// What the kernels of swap_rows read: triples, and whether they are inside.
#pragma once

#include <jitkern/copy.cuh>

#include "swap.h"

namespace jitkern {

struct SwapTriple {
  i64 fetch;
  i64 slot;
  i64 back;

  __device__ bool is_padding() const { return slot < 0; }
  __device__ bool is_inside(const SwapParams& p) const {
    return slot >= 0 && slot < p.num_slots && fetch < p.num_host_rows && back < p.num_host_rows;
  }
};

template <int kIndexBytes>
__device__ inline SwapTriple read_triple(const SwapParams& p, i64 number) {
  if (number >= p.num_triples) return {-1, -1, -1};
  const auto* triple = static_cast<const Index<kIndexBytes>*>(p.triples) + 3 * number;
  return {triple[0], triple[1], triple[2]};
}

// Notes what is wrong with a triple, if anything is.
__device__ inline void report_triple(const SwapParams& p, const SwapTriple& triple, i64 number) {
  if (triple.is_padding() || triple.is_inside(p)) return;
  const i64 position = p.first_position + number;
  if (triple.fetch >= p.num_host_rows) {
    report_fault(p.fault, p.fetch_site, position, triple.fetch, p.num_host_rows);
  } else if (triple.slot >= p.num_slots) {
    report_fault(p.fault, p.slot_site, position, triple.slot, p.num_slots);
  } else {
    report_fault(p.fault, p.back_site, position, triple.back, p.num_host_rows);
  }
}

}  // namespace jitkern
