// The kernel of the fake GPU: what csrc/ops/pairs.cuh does.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "fake_gpu.h"

namespace fake {

namespace {

using namespace jitkern;

std::atomic<i64> faults{0};

struct HostPair {
  i64 src_row, dst_row;
};

i64 item(const void* items, int item_bytes, i64 i) {
  return item_bytes == 4 ? static_cast<const int32_t*>(items)[i]
                         : static_cast<const int64_t*>(items)[i];
}
HostPair read_pair(const PairCopyParams& p, int index_bytes, i64 i) {
  return {item(p.pairs, index_bytes, 2 * i), item(p.pairs, index_bytes, 2 * i + 1)};
}

}  // namespace

void copy_pairs(const KernelSpec& f, const PairCopyParams& p) {
  const i64 count = p.last_pair == nullptr ? p.num_pairs : i64(*p.last_pair + 1u);
  require_memory(p.pairs, 2 * count * f.index_bytes, "pairs");
  for (i64 i = 0; i < count; ++i) {
    const HostPair pair = read_pair(p, f.index_bytes, i);
    if (pair.src_row < 0 || pair.dst_row < 0) continue;
    if (pair.src_row >= p.num_src_rows || pair.dst_row >= p.num_dst_rows) {
      ++faults;
      continue;
    }
    const char* const src = p.src + pair.src_row * p.src_stride_bytes;
    char* const dst = p.dst + pair.dst_row * p.dst_stride_bytes;
    require_memory(src, f.row_bytes, "source rows");
    require_memory(dst, f.row_bytes, "destination rows");
    std::memcpy(dst, src, static_cast<size_t>(f.row_bytes));
    if (p.slot_map == nullptr) continue;
    const i64 row = p.slot_rows == nullptr ? pair.src_row : item(p.slot_rows, f.index_bytes, i);
    if (row < 0) continue;
    char* const entry = static_cast<char*>(p.slot_map) + row * p.slot_map_bytes;
    require_memory(entry, p.slot_map_bytes, "slot map");
    const auto narrow = static_cast<int32_t>(pair.dst_row);
    std::memcpy(entry, p.slot_map_bytes == 4 ? static_cast<const void*>(&narrow) : &pair.dst_row,
                static_cast<size_t>(p.slot_map_bytes));
  }
}

void require_launch(const KernelSpec& f, const LaunchConfig& config, const PairCopyParams& p) {
  const auto bits = [](const void* at, i64 stride) {
    return reinterpret_cast<u64>(at) | static_cast<u64>(stride);
  };
  const u64 src_bits = bits(p.src, p.src_stride_bytes);
  const u64 dst_bits = bits(p.dst, p.dst_stride_bytes);
  const u64 vec_bytes = static_cast<u64>(f.vec_bytes);
  if ((src_bits | dst_bits | static_cast<u64>(f.row_bytes)) % vec_bytes != 0) {
    fail_program("is asked for unaligned vectors");
  }
  const bool in_line = kHostLineBytes % f.row_bytes == 0 && src_bits % u64(f.row_bytes) == 0;
  if (f.line_aligned != 0 && !in_line && src_bits % kHostLineBytes != 0) {
    fail_program("is asked for rows that do not begin where lines do");
  }
  if (f.large != 0) return;  // its blocks go on until all is done
  const i64 window = window_bytes(f.row_bytes, f.vec_bytes, f.line_aligned != 0);
  const i64 wanted = group_shape(window, f.vec_bytes, 1).num_threads(p.num_pairs);
  if (i64(config.grid[0]) * config.block[0] < wanted) fail_program("is given too few threads");
}

i64 num_faults() { return faults; }

}  // namespace fake
