// What store_cache and store_rows share on the host.
#pragma once

#include <jitkern/launch.h>

#include <vector>

namespace jitkern {

// An index whose row is not stored; -1, as any negative one, for None.
inline i64 skip_arg(const char* op, AnyView value) {
  return is_none(value) ? -1 : int_arg(op, "skip", value);
}

// IndexError for the first index past the end that is not skipped. On the CPU.
void check_indices(const Indices& indices, i64 num_slots, i64 skip);

// Stores rows of one or two parts side by side in one cache, or of one part in each of two.
void store_parts(const std::vector<Tensor>& caches, const Indices& indices,
                 const std::vector<Tensor>& parts, i64 skip, FaultSite site);

}  // namespace jitkern
