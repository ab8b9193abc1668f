// The pairs that indices of a table in host memory become, on exact buffers. What is done with the
// pairs has the sweeps of pair_lists.cc and pair_copy.cc.
#include "ops/index.cu"

#include "sweep.h"
#include "vocabulary.h"

namespace emulate {

using jitkern::IndexPairsParams;

constexpr FaultSite kIndicesSite{3};
constexpr i64 kUntouched = -9;

template <class Int, i64 kRowBytes, int kVecBytes>
void one_run(Random& random, Tally& tally) {
  using Kernel =
      jitkern::PairsOfIndices<kRowBytes, kVecBytes, sizeof(Int), kListConfig.num_threads, 1>;
  const i64 num_rows = random.pick({i64(1), i64(31), i64(32), i64(256), i64(257), i64(700)});
  const Vocabulary vocabulary = any_vocabulary(random.pick({0, 1, 7, 20}), random);
  const std::vector<i64> values = any_indices(vocabulary, num_rows, sizeof(Int), random);
  IntBuffer indices("indices", values, sizeof(Int));
  IntBuffer pairs("pairs", std::vector<i64>(2 * num_rows, kUntouched), sizeof(Int));
  const Placement at = any_placement(kRowBytes, kVecBytes, random);
  RowBuffer output("output", num_rows, kRowBytes, at.stride_bytes, at.offset, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_rows; ++i) {
    const i64 index = indices.at(i);
    if (index > vocabulary.last_index) {
      fault.expect(kIndicesSite, i, index, vocabulary.last_index + 1);
    }
    const i64 row = vocabulary.row_of(index);
    pairs.expect(2 * i, row);
    pairs.expect(2 * i + 1, row >= 0 ? i : -1);
    if (row < 0) std::memset(output.expected(i), 0, kRowBytes);
  }
  const IndexPairsParams params{
      {output.row(0), nullptr, at.stride_bytes, kRowBytes, indices.data(), num_rows,
       vocabulary.start, vocabulary.length, vocabulary.added_start, vocabulary.added_length,
       vocabulary.added_row, vocabulary.last_index, kIndicesSite, fault.record()},
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
  rounds("index_table", 300, [&](Random& random, int) {
    one_run<i32, 1, 1>(random, tally);
    one_run<i64, 40, 8>(random, tally);
    one_run<i32, 656, 16>(random, tally);
  });
  report("index_table", 3, tally);
}
