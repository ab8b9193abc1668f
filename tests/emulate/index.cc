// The indexing kernel on exact buffers.
// 100 row sizes to a program.
#include "ops/index.cu"

#include "sweep.h"
#include "vocabulary.h"

namespace emulate {

using jitkern::IndexParams;

constexpr FaultSite kIndicesSite{4};

constexpr int num_splits(i64 row_bytes, int vec_bytes) {
  const i64 bytes = i64(INDEX_VECS_PER_SPLIT) * vec_bytes;
  return static_cast<int>((row_bytes + bytes - 1) / bytes);
}

template <i64 kRowBytes, int kVecBytes, int kIndexBytes>
void add(Specialisations<IndexParams>& list) {
  using Kernel = jitkern::IndexKernel<kRowBytes, num_splits(kRowBytes, kVecBytes), INDEX_CONFIG,
                                      kVecBytes, kIndexBytes, INDEX_IN_FLIGHT>;
  list.push_back({kRowBytes, kVecBytes, kIndexBytes, 0, Kernel::kNumThreads, Kernel::run});
}

template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<IndexParams>& list) {
  constexpr int kIndexBytes = index_bytes_in_turn(kRowBytes);
  add<kRowBytes, kVecBytes, kIndexBytes>(list);
  if constexpr (sweeps_all(kRowBytes)) add<kRowBytes, kVecBytes, 12 - kIndexBytes>(list);
}
EMULATE_COLLECT(IndexParams, kernels)

void one_run(const Specialisation<IndexParams>& kernel, int run, Random& random, Tally& tally) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const jitkern::GroupShape shape =
      jitkern::group_shape(row_bytes, vec_bytes, INDEX_IN_FLIGHT, num_splits(row_bytes, vec_bytes));
  const i64 num_rows = any_num_rows(shape, kernel.num_threads, random);
  const i64 table_rows = random.pick({1, 2, 7, 20});

  const Vocabulary vocabulary = any_vocabulary(table_rows, random);
  const std::vector<i64> values = any_indices(vocabulary, num_rows, kernel.index_bytes, random);
  IntBuffer indices("indices", values, kernel.index_bytes);

  Placement weights_at = any_placement(row_bytes, vec_bytes, random);
  weights_at.offset = offset_of_run(kernel, run);
  if (random.below(8) == 0) weights_at.stride_bytes = 0;  // an expanded row
  const Placement output_at = any_placement(row_bytes, vec_bytes, random);
  RowBuffer weights("weights", table_rows, row_bytes, weights_at.stride_bytes, weights_at.offset,
                    random);
  RowBuffer output("output", num_rows, row_bytes, output_at.stride_bytes, output_at.offset, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_rows; ++i) {
    const i64 index = indices.at(i);
    if (index > vocabulary.last_index) {
      fault.expect(kIndicesSite, i, index, vocabulary.last_index + 1);
    }
    if (const i64 row = vocabulary.row_of(index); row >= 0) {
      std::memcpy(output.expected(i), weights.row(row), row_bytes);
    } else {
      std::memset(output.expected(i), 0, row_bytes);
    }
  }
  const IndexParams params{output.row(0),          weights.row(0),
                           output_at.stride_bytes, weights_at.stride_bytes,
                           indices.data(),         num_rows,
                           vocabulary.start,       vocabulary.length,
                           vocabulary.added_start, vocabulary.added_length,
                           vocabulary.added_row,   vocabulary.last_index,
                           kIndicesSite,           fault.record()};
  const unsigned blocks = ceil_div(shape.num_threads(num_rows), kernel.num_threads);
  run_kernel(kernel, {blocks}, kernel.num_threads, random, params, tally);
  output.check();
  weights.check();
  indices.check();
  fault.check();
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("index", collect(SweepRows()), runs_at_every_offset<IndexParams>, one_run);
}
