// Copies of many rows on the CPU.
//
// A plain store first reads the line that it overwrites; a streaming (non-temporal) store does not,
// so a third of the traffic is saved. Rows at random places are asked for a few rows ahead of their
// copy. Measured against memcpy row by row, 8,192 rows that no cache holds, one core of a Xeon:
// store 2.5x (256 B) to 1.5x (8 KB), indexing 1.2x to 1.5x.
#pragma once

#include <jitkern/parallel.h>
#include <jitkern/types.h>

#include <cstring>

namespace jitkern {

using CopyRow = void (*)(char* dst, const char* src, i64 row_bytes);

inline void copy_row(char* dst, const char* src, i64 row_bytes) {
  std::memcpy(dst, src, row_bytes);
}

// A copy that passes the caches by for every whole line of `dst`; plain where the processor is not
// x86. Other threads may read the rows after end_stream().
CopyRow streaming_copy_row();
void end_stream();

constexpr i64 kLineBytes = 64;

// Which rows are at random places in their tables.
enum RandomRows : int { kRandomSources = 1, kRandomTargets = 2, kRandomBoth = 3 };

// The size of the table written to from which rows are streamed. At random places a plain store
// waits for its line, unless the table stays in the 2 MiB of L2 that a core has.
constexpr i64 kStreamRandomMinBytes = i64(2) << 20;
// Of a table written from begin to end, for each thread: the processor fetches lines ahead, and to
// stream past lines that caches hold is slower (16 MiB, 16 threads: 147 us, plain stores 95).
constexpr i64 kStreamMinBytesPerThread = i64(4) << 20;

constexpr i64 kRowsAhead = 4;   // rows between the prefetch and the copy
constexpr i64 kLinesAhead = 4;  // of a source row; the processor sees by itself what follows

inline bool shares_line(const char* end) { return reinterpret_cast<u64>(end) % kLineBytes != 0; }

struct CpuRow {
  char* dst;        // null: nothing to do
  const char* src;  // null: zeros
};

// What the copy will wait for: the source where it is at a random place, and the lines that the
// row shares with its neighbours, which are not streamed. (Not inlined, GCC takes a function of
// nothing but prefetches for one without effects and drops the call.)
template <int kRandomRows>
__attribute__((always_inline)) inline void prefetch_row(const CpuRow& row, i64 row_bytes) {
  if (row.dst == nullptr) return;
  if ((kRandomRows & kRandomSources) != 0 && row.src != nullptr) {
    for (i64 at = 0; at < row_bytes && at < kLinesAhead * kLineBytes; at += kLineBytes) {
      __builtin_prefetch(row.src + at);
    }
  }
  if (shares_line(row.dst)) __builtin_prefetch(row.dst, 1);
  if (shares_line(row.dst + row_bytes)) __builtin_prefetch(row.dst + row_bytes, 1);
}

// Copies rows [0, count); `row_at(i)` says where row i goes and where it comes from. `dst_bytes` is
// the size of the table that they go to.
template <int kRandomRows, class RowAt>
void copy_rows(i64 count, i64 row_bytes, i64 dst_bytes, const RowAt& row_at) {
  const i64 threads = threads_for(count, 2 * count * row_bytes);
  const bool stream =
      dst_bytes >= ((kRandomRows & kRandomTargets) != 0 ? kStreamRandomMinBytes
                                                        : threads * kStreamMinBytesPerThread);
  const CopyRow copy = stream ? streaming_copy_row() : copy_row;
  parallel_for(count, threads, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) prefetch_row<kRandomRows>(row_at(i + kRowsAhead), row_bytes);
      const CpuRow row = row_at(i);
      if (row.dst == nullptr) continue;
      if (row.src == nullptr) {
        std::memset(row.dst, 0, row_bytes);
      } else {
        copy(row.dst, row.src, row_bytes);
      }
    }
    if (stream) end_stream();
  });
}

}  // namespace jitkern
