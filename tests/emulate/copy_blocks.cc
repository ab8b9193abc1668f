// copy_blocks between lists of buffers: any address per layer, parts, rows, sizes that differ,
// pairs as two vectors, and a flag for each layer once all of its bytes are there.
#include <jitkern/copy.cuh>

#include <cstring>
#include <map>
#include <vector>

namespace emulate {

// Stores as a GPU may delay them: a fence publishes those of its warp, whose lanes __syncwarp
// orders, to the device; a system fence of any thread publishes all that is on the device.
struct DelayedStores {
  struct Store {
    char* to;
    char bytes[16];
    int num_bytes;
  };
  bool is_on = false;
  std::map<jitkern::i64, std::vector<Store>> by_warp;
  std::vector<Store> on_device;

  void fence() {
    std::vector<Store>& own = by_warp[jitkern::thread_number() / 32];
    on_device.insert(on_device.end(), own.begin(), own.end());
    own.clear();
  }
  void system_fence() {
    for (const Store& store : on_device) std::memcpy(store.to, store.bytes, store.num_bytes);
    on_device.clear();
  }
  // At the end of a kernel.
  void finish() {
    for (auto& [warp, own] : by_warp) on_device.insert(on_device.end(), own.begin(), own.end());
    by_warp.clear();
    system_fence();
  }
};
inline DelayedStores delayed;

}  // namespace emulate

namespace jitkern {

template <int kBytes>
void store_vec_or_delay(char* to, Vec<kBytes> value) {
  if (!emulate::delayed.is_on) return store_vec<kBytes>(to, value);
  emulate::DelayedStores::Store store{to, {}, kBytes};
  std::memcpy(store.bytes, &value, kBytes);
  emulate::delayed.by_warp[thread_number() / 32].push_back(store);
}

}  // namespace jitkern

#define store_vec store_vec_or_delay
#include "ops/copy_blocks.cu"
#undef store_vec

#include "pairs.h"

namespace emulate {

constexpr Config kConfig{COPY_BLOCKS_CONFIG};

// A kernel whose pairs are in its parameters.
template <class Kernel>
void run_inline(const CopyBlocksParams& p) {
  InlineBlocksParams params;
  static_cast<CopyBlocksParams&>(params) = p;
  std::memcpy(params.inline_pairs, p.pairs, 8 * p.num_pairs);
  params.pairs = nullptr;
  Kernel::run(params);
}

template <int kVecBytes, int kIndexBytes, HostSide kLinesOf>
void add(Specialisations<CopyBlocksParams>& list) {
  constexpr int kInFlight =
      kLinesOf == kHostTarget ? COPY_BLOCKS_WRITE_IN_FLIGHT : COPY_BLOCKS_READ_IN_FLIGHT;
  using Kernel = CopyBlocks<kVecBytes, kIndexBytes, kConfig.num_threads, kConfig.max_occupancy,
                            kInFlight, kLinesOf>;
  if constexpr (kIndexBytes == 0) {
    list.push_back({0, kVecBytes, 0, kLinesOf, Kernel::kNumThreads, run_inline<Kernel>});
  } else {
    list.push_back({0, kVecBytes, kIndexBytes, kLinesOf, Kernel::kNumThreads, Kernel::run});
  }
}

// A buffer per layer, or layers at one distance in one buffer.
struct Side {
  i64 num_blocks;  // counts parts
  i64 num_parts;
  i64 num_rows;
  bool rows_first;  // rows of a block are further apart than its parts
  bool is_table;
  i64 stride_bytes;
  i64 lead = -1;  // if all rows begin at one place of their lines
  std::vector<RowBuffer> buffers;
  std::vector<BufferEntry> entries;

  Side(const char* name, i64 blocks, const std::vector<i64>& row_bytes, i64 num_rows, bool alike,
       int vec_bytes, bool same_lead, Random& random)
      : num_parts(random.pick({1, 1, 2, 3})),
        num_rows(num_rows),
        rows_first(random.below(2) == 0),
        is_table(!alike || num_rows > 1 || random.below(3) > 0) {
    if (!is_table) num_parts = 1;
    num_blocks = ceil_div(blocks, num_parts) * num_parts;
    const i64 longest = *std::max_element(row_bytes.begin(), row_bytes.end());
    stride_bytes = longest + random.pick({0, 0, 1, 3}) * vec_bytes;
    if (same_lead) stride_bytes = ceil_div(stride_bytes, 128) * i64(128);
    if (same_lead) lead = random.below(128 / vec_bytes) * vec_bytes;
    const i64 layers = static_cast<i64>(row_bytes.size());
    const auto add_buffer = [&](i64 rows, i64 bytes) {
      const i64 offset = lead < 0 ? random.below(128 / vec_bytes) * vec_bytes : lead;
      buffers.emplace_back(name, rows, bytes, Placement{offset, stride_bytes}, random);
    };
    if (!is_table) add_buffer(layers * num_blocks, longest);
    for (i64 layer = 0; is_table && layer < layers; ++layer) {
      add_buffer(num_blocks * num_rows, row_bytes[layer]);
      entries.push_back({reinterpret_cast<u64>(buffers[layer].row(0)),
                         num_parts * num_rows * stride_bytes,
                         (rows_first ? 1 : num_rows) * stride_bytes, num_rows * row_bytes[layer]});
    }
  }

  RowBuffer& buffer(i64 layer) { return buffers[is_table ? layer : 0]; }
  i64 row(i64 layer, i64 block, i64 row) const {
    if (!is_table) return layer * num_blocks + block;
    const i64 whole = block / num_parts, part = block % num_parts;
    return whole * num_parts * num_rows +
           (rows_first ? row * num_parts + part : part * num_rows + row);
  }
  BlockSide params() {
    BlockSide side{};
    side.row_stride = (rows_first ? num_parts : 1) * stride_bytes;
    side.num_blocks = num_blocks;
    side.num_parts = static_cast<u32>(num_parts);
    if (is_table) {
      side.table = entries.data();
    } else {
      side.first = {reinterpret_cast<u64>(buffer(0).row(0)), stride_bytes, 0, 0};
      side.layer_bytes = num_blocks * stride_bytes;
    }
    return side;
  }
};

void one_run(const Specialisation<CopyBlocksParams>& kernel, int, Random& random) {
  const int vec_bytes = kernel.vec_bytes;
  const i64 segment = segment_bytes(vec_bytes);
  const bool alike = random.below(3) > 0;
  const i64 num_rows = alike ? random.pick({1, 1, 2, 5}) : 1;
  const i64 num_flags = random.pick({1, 2, 3});
  const i64 num_layers = num_flags * random.pick({1, 1, 2});
  std::vector<i64> row_bytes;
  for (i64 layer = 0; layer < num_layers; ++layer) {
    const i64 around = random.pick({i64(0), i64(1), i64(2), i64(5)}) * segment;
    const i64 bytes = std::max<i64>(vec_bytes, around + (random.below(9) - 4) * vec_bytes);
    row_bytes.push_back(alike && layer > 0 ? row_bytes[0] : bytes);
  }
  const i64 num_pairs = random.pick({1, 2, 7, 20});
  const bool lines_of_dst = kernel.variant == kHostTarget, same_lead = random.below(3) == 0;
  Side src("src", random.pick({i64(1), num_pairs, 2 * num_pairs}), row_bytes, num_rows, alike,
           vec_bytes, same_lead && !lines_of_dst, random);
  Side dst("dst", num_pairs + random.below(num_pairs + 2), row_bytes, num_rows, alike, vec_bytes,
           same_lead && lines_of_dst, random);

  const int index_bytes = kernel.index_bytes == 0 ? 4 : kernel.index_bytes;
  const std::vector<i64> flat =
      any_pairs(num_pairs, src.num_blocks, dst.num_blocks, index_bytes, random);
  std::vector<i64> firsts, seconds;
  for (i64 i = 0; i < num_pairs; ++i) {
    firsts.push_back(flat[2 * i]), seconds.push_back(flat[2 * i + 1]);
  }
  IntBuffer pairs("pairs", flat, index_bytes), sources("sources", firsts, index_bytes),
      targets("targets", seconds, index_bytes);
  const bool two_vectors = kernel.index_bytes != 0 && random.below(2) == 0;

  const int count_bytes = random.pick({0, 0, 4, 8});
  const i64 count = random.pick({i64(-3), i64(0), num_pairs / 2, num_pairs, num_pairs + 5});
  const IntBuffer counted("count", {count}, count_bytes == 4 ? 4 : 8);
  const i64 last = count_bytes == 0 ? num_pairs : std::min(std::max<i64>(count, 0), num_pairs);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < last; ++i) {
    const i64 source = pairs.at(2 * i), target = pairs.at(2 * i + 1);
    if (!expect_pair(fault, i, source, target, src.num_blocks, dst.num_blocks)) continue;
    for (i64 layer = 0; layer < num_layers; ++layer) {
      for (i64 row = 0; row < num_rows; ++row) {
        std::memcpy(dst.buffer(layer).expected(dst.row(layer, target, row)),
                    src.buffer(layer).row(src.row(layer, source, row)), row_bytes[layer]);
      }
    }
  }
  const bool signals = random.below(2) == 0;
  constexpr u32 kValue = 7;
  IntBuffer flags("flags", num_flags, 3, 4), num_past("num_past", num_flags, 0, 4);
  CopyBlocksParams params{};
  params.dst = dst.params();
  params.src = src.params();
  params.pairs = two_vectors ? sources.data() : pairs.data();
  params.dst_blocks = two_vectors ? targets.data() : nullptr;
  params.count = count_bytes == 0 ? nullptr : counted.data();
  params.count_bytes = count_bytes;
  params.num_pairs = num_pairs;
  params.num_layers = num_layers;
  params.num_rows = num_rows;
  params.row_bytes = alike ? row_bytes[0] : 0;
  const i64 longest = *std::max_element(row_bytes.begin(), row_bytes.end());
  const i64 lead = (lines_of_dst ? dst : src).lead;
  params.num_segments = segments_of(longest, lead < 0 ? 128 - vec_bytes : lead, vec_bytes);
  params.src_site = kSrcSite;
  params.dst_site = kDstSite;
  params.fault = fault.record();
  if (signals) {
    params.signals = {flags.words(), num_past.words(), kValue, static_cast<u32>(num_flags)};
    for (i64 i = 0; i < num_flags; ++i) flags.expect(i, kValue);
  }
  // What is signalled is there.
  const auto check_signals = [&] {
    for (i64 layer = 0; signals && layer < num_layers; ++layer) {
      if (flags.words()[layer / (num_layers / num_flags)] != kValue) continue;
      for (i64 block = 0; block < dst.num_blocks; ++block) {
        for (i64 row = 0; row < num_rows; ++row) {
          const i64 at = dst.row(layer, block, row);
          if (std::memcmp(dst.buffer(layer).row(at), dst.buffer(layer).expected(at),
                          row_bytes[layer]) != 0) {
            fail("layer " + std::to_string(layer) + " is signalled before it is there");
          }
        }
      }
    }
  };
  const unsigned blocks = random.pick({1u, 3u});
  delayed.is_on = signals;
  on_fence = [&] { delayed.fence(); };
  on_system_fence = [&] {
    delayed.system_fence();
    check_signals();
  };
  run_kernel(kernel, {blocks}, 64, random, params);
  on_fence = on_system_fence = nullptr;
  check_signals();
  delayed.finish();
  for (RowBuffer& buffer : dst.buffers) buffer.check();
  for (RowBuffer& buffer : src.buffers) buffer.check();
  check_all(pairs, sources, targets, fault, flags, num_past);
}

template <int... kVecs>
void add_all(Specialisations<CopyBlocksParams>& list) {
  (add<kVecs, 0, kHostSource>(list), ...);
  (add<kVecs, 0, kHostTarget>(list), ...);
  (add<kVecs, 4, kHostSource>(list), ...);
  (add<kVecs, 8, kHostTarget>(list), ...);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  Specialisations<CopyBlocksParams> list;
  add_all<1, 2, 4, 8, 16>(list);
  return sweep(
      "copy_blocks", list, [](const Specialisation<CopyBlocksParams>&) { return 80; }, one_run);
}
