// Copies of rows on the CPU.
#pragma once

#include <jitkern/types.h>

#include <cstring>

namespace jitkern {

struct CpuRow {
  char* dst;        // null: no copy
  const char* src;  // null: zeros
};

// Copies `count` rows, row i as given by `row_at(i)`.
template <class RowAt>
void copy_rows(i64 count, i64 row_bytes, const RowAt& row_at) {
  for (i64 i = 0; i < count; ++i) {
    const CpuRow row = row_at(i);
    if (row.dst == nullptr) continue;
    if (row.src == nullptr) std::memset(row.dst, 0, row_bytes);
    if (row.src != nullptr) std::memcpy(row.dst, row.src, row_bytes);
  }
}

}  // namespace jitkern
