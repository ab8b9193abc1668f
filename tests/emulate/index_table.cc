// The pairs that indices of a table in host memory become, on exact buffers. What is done with the
// pairs has the sweeps of pair_lists.cc and pair_copy.cc.
#include "ops/index_table.cu"

#include <limits>

#include "pair_configs.h"
#include "sweep.h"

namespace emulate {

using jitkern::IndexPairsParams;

constexpr FaultSite kIndicesSite{3};
constexpr i64 kUntouched = -9;

template <class Int, i64 kRowBytes, int kVecBytes>
void one_run(Random& random, Tally& tally) {
  using Kernel =
      jitkern::PairsOfIndices<kRowBytes, kVecBytes, sizeof(Int), kListConfig.num_threads, 1>;
  const i64 num_rows = random.pick({i64(1), i64(31), i64(32), i64(256), i64(257), i64(700)});
  // One rank's part of a table that is split over ranks, or the whole table.
  const bool part = random.below(2) == 0;
  const i64 table_rows = random.pick({0, 1, 7, 20});
  const i64 vocab_start = part ? random.below(30) : 0;
  const i64 vocab_length = part ? random.below(table_rows + 1) : table_rows;
  const i64 last_index = part ? std::numeric_limits<i64>::max() : table_rows - 1;
  std::vector<i64> values(num_rows);
  for (i64& value : values)
    value = random.below(part ? vocab_start + table_rows + 3 : table_rows + 1);
  spoil(values, part ? vocab_start + vocab_length : table_rows, sizeof(Int), random);
  IntBuffer indices("indices", values, sizeof(Int));
  IntBuffer pairs("pairs", std::vector<i64>(2 * num_rows, kUntouched), sizeof(Int));
  const Placement at = any_placement(kRowBytes, kVecBytes, random);
  RowBuffer output("output", num_rows, kRowBytes, at.stride_bytes, at.offset, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_rows; ++i) {
    const i64 index = indices.at(i);
    if (index > last_index) fault.expect(kIndicesSite, i, index, last_index + 1);
    const bool inside = index >= vocab_start && index - vocab_start < vocab_length;
    pairs.expect(2 * i, inside ? index - vocab_start : -1);
    pairs.expect(2 * i + 1, inside ? i : -1);
    if (!inside) std::memset(output.expected(i), 0, kRowBytes);
  }
  const IndexPairsParams params{
      {output.row(0), nullptr, at.stride_bytes, kRowBytes, indices.data(), num_rows, vocab_start,
       vocab_length, last_index, kIndicesSite, fault.record()},
      pairs.data()};
  const unsigned blocks = ceil_div(num_rows, Kernel::kNumThreads);
  launch_fibers({blocks}, {Kernel::kNumThreads}, any_order(random), [&] { Kernel::run(params); });
  ++tally.runs;
  tally.threads += i64(blocks) * Kernel::kNumThreads;
  tally.faults += fault.record()->site < FaultSite(77) && fault.record()->state != 0;
  pairs.check();
  output.check();
  indices.check();
  fault.check();
}

}  // namespace emulate

int main() {
  using namespace emulate;
  install_reports();
  Tally tally;
  for (int run = 0; run < 300; ++run) {
    now_running = "index_table: run " + std::to_string(run);
    Random random(run);
    for (int i = 0; i < 4; ++i) random.bits();
    one_run<i32, 1, 1>(random, tally);
    one_run<i64, 40, 8>(random, tally);
    one_run<i32, 656, 16>(random, tally);
  }
  report("index_table", 3, tally);
}
