// swap_rows on exact buffers.
// 50 row sizes to a program.
#include "ops/swap.cu"

#include "sweep.h"

namespace emulate {

using jitkern::kHostLineBytes;
using jitkern::SwapParams;

// Bits of Specialisation::variant.
enum Variant { kLineAligned = 1, kSmallCall = 2 };

constexpr FaultSite kFetchSite{5};
constexpr FaultSite kSlotSite{6};
constexpr FaultSite kBackSite{7};

constexpr int in_flight(int variant) {
  return variant & kSmallCall ? PAIRS_SMALL_IN_FLIGHT : SWAP_LARGE_IN_FLIGHT;
}

struct Config {
  int num_threads, max_occupancy;
  bool use_pdl;
};
constexpr Config config(int variant) {
  return variant & kSmallCall ? Config{PAIRS_SMALL_CONFIG} : Config{PAIRS_LARGE_CONFIG};
}

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, int kVariant>
void add(Specialisations<SwapParams>& list) {
  using Kernel =
      jitkern::SwapRows<kRowBytes, config(kVariant).num_threads, config(kVariant).max_occupancy,
                        kVecBytes, kIndexBytes, bool(kVariant & kLineAligned),
                        !(kVariant & kSmallCall), in_flight(kVariant)>;
  list.push_back({kRowBytes, kVecBytes, kIndexBytes, kVariant, Kernel::kNumThreads, Kernel::run});
}

// Index type, alignment and size of the call take turns.
template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<SwapParams>& list) {
  constexpr int kIndex = index_bytes_in_turn(kRowBytes);
  constexpr int kOther = 12 - kIndex;
  constexpr int kAligned = kRowBytes % 3 == 0 ? kLineAligned : 0;
  add<kRowBytes, kVecBytes, kIndex, kAligned>(list);
  add<kRowBytes, kVecBytes, kOther, (kLineAligned - kAligned) | kSmallCall>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add<kRowBytes, kVecBytes, kOther, (kLineAligned - kAligned)>(list);
    add<kRowBytes, kVecBytes, kIndex, kAligned | kSmallCall>(list);
  }
#ifdef SWEEP_ALL
  add<kRowBytes, kVecBytes, kOther, kAligned>(list);
  add<kRowBytes, kVecBytes, kIndex, (kLineAligned - kAligned)>(list);
#endif
}
EMULATE_COLLECT(SwapParams, kernels)

// On the host's side of a line-aligned call every row begins on a line.
Placement on_lines(Placement at) {
  const i64 lines = (at.stride_bytes + kHostLineBytes - 1) / kHostLineBytes;
  return {0, lines * kHostLineBytes};
}

// Rows that are written back to are distinct, and fetched by no other triple.
std::vector<i64> any_triples(i64 count, i64 host_rows, i64 slots, int index_bytes, Random& random) {
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

void one_run(const Specialisation<SwapParams>& kernel, int run, Random& random, Tally& tally) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const bool line_aligned = kernel.variant & kLineAligned;
  const bool small_call = kernel.variant & kSmallCall;
  const i64 window = jitkern::window_bytes(row_bytes, vec_bytes, line_aligned);
  const int vecs = jitkern::swap_in_flight(window, vec_bytes, in_flight(kernel.variant));
  const jitkern::GroupShape shape = jitkern::group_shape(window, vec_bytes, vecs);
  // Where the lanes of a warp wait for each other, blocks are small.
  const bool talks = !line_aligned && shape.splits == 1;
  const unsigned num_threads = talks ? 64 : kernel.num_threads;
  const i64 count = any_num_rows(shape, num_threads, random);
  const i64 host_rows = 2 * count + random.below(count + 1);
  const i64 slots = count + random.below(count + 2);
  IntBuffer triples("triples", any_triples(count, host_rows, slots, kernel.index_bytes, random),
                    kernel.index_bytes);

  Placement host_at = any_placement(row_bytes, vec_bytes, random);
  const Placement gpu_at = any_placement(row_bytes, vec_bytes, random);
  host_at.offset = offset_of_run(kernel, run);
  if (line_aligned) host_at = on_lines(host_at);
  RowBuffer host("host", host_rows, row_bytes, host_at.stride_bytes, host_at.offset, random);
  RowBuffer gpu("gpu", slots, row_bytes, gpu_at.stride_bytes, gpu_at.offset, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < count; ++i) {
    const i64 fetch = triples.at(3 * i);
    const i64 slot = triples.at(3 * i + 1);
    const i64 back = triples.at(3 * i + 2);
    if (slot < 0) continue;
    if (fetch >= host_rows) {
      fault.expect(kFetchSite, i, fetch, host_rows);
    } else if (slot >= slots) {
      fault.expect(kSlotSite, i, slot, slots);
    } else if (back >= host_rows) {
      fault.expect(kBackSite, i, back, host_rows);
    } else {
      if (back >= 0) std::memcpy(host.expected(back), gpu.row(slot), row_bytes);
      if (fetch >= 0) std::memcpy(gpu.expected(slot), host.row(fetch), row_bytes);
    }
  }
  SwapParams params{};
  params.host = host.row(0);
  params.gpu = gpu.row(0);
  params.host_stride_bytes = host_at.stride_bytes;
  params.gpu_stride_bytes = gpu_at.stride_bytes;
  params.triples = triples.data();
  params.num_triples = count;
  params.num_host_rows = host_rows;
  params.num_slots = slots;
  params.fetch_site = kFetchSite;
  params.slot_site = kSlotSite;
  params.back_site = kBackSite;
  params.fault = fault.record();
  const unsigned blocks = ceil_div(shape.num_threads(count), num_threads);
  run_kernel(kernel, {small_call ? blocks : std::min(blocks, 1 + unsigned(run) % 2)}, num_threads,
             random, params, tally, talks);
  host.check();
  gpu.check();
  triples.check();
  fault.check();
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("swap", collect<kSweepFirst>(SweepRows()), runs_at_every_offset<SwapParams>,
               one_run);
}
