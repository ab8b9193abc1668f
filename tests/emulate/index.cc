// The indexing kernel on exact buffers.
// 100 row sizes to a program.
#include "ops/index.cu"

#include <limits>

#include "sweep.h"

namespace emulate {

constexpr FaultSite kIndicesSite{4};

// The indices of the rows of a table: all, one range, or two. table_row() is proved in
// tests/ops/test_index.py.
constexpr i64 kMaxIndex = std::numeric_limits<i64>::max();

struct Vocabulary : IndexParams {
  i64 bound = 0;  // a few indices behind the last that is a row
};

Vocabulary any_vocabulary(i64 table_rows, Random& random) {
  Vocabulary v{};
  if (random.below(3) == 0) {  // the whole table
    v.vocab_length = v.bound = table_rows;
    v.last_index = table_rows - 1;
    return v;
  }
  v.vocab_length = v.added_row = random.below(table_rows + 1);
  if (random.below(3) != 0) v.added_length = random.below(table_rows - v.vocab_length + 1);
  // Either may be in front of the other, with a gap or without.
  const bool swapped = random.below(2) == 0;
  const i64 first = random.below(30);
  const i64 second = first + (swapped ? v.added_length : v.vocab_length) + random.pick({0, 1, 5});
  v.vocab_start = swapped ? second : first;
  v.added_start = swapped ? first : second;
  const i64 end = std::max(v.vocab_start + v.vocab_length, v.added_start + v.added_length);
  v.last_index = random.below(2) == 0 ? end + random.below(4) - 1 : kMaxIndex;
  v.bound = end + 3;
  return v;
}

// Indices in and around the ranges.
std::vector<i64> any_indices(const Vocabulary& v, i64 count, int index_bytes, Random& random) {
  std::vector<i64> values(count);
  const i64 below = std::max<i64>(std::min(v.bound - 1, v.last_index) + 1, 1);
  for (i64& value : values) value = random.below(below);
  spoil(values, v.last_index < kMaxIndex ? v.last_index + 1 : v.bound, index_bytes, random);
  return values;
}

IndexParams index_params(RowBuffer& output, const char* weights, const CacheStrides& strides,
                         const Vocabulary& v, const IntBuffer& indices, FaultWord& fault) {
  IndexParams params = v;
  params.output = output.row(0);
  params.weights = weights;
  params.output_stride_bytes = output.stride_bytes();
  params.strides = strides;
  params.indices = indices.data();
  params.num_rows = indices.size();
  params.indices_site = kIndicesSite;
  params.fault = fault.record();
  return params;
}

// The row of element i, -1 if none; an index that is too large may be the fault.
i64 expect_index(const Vocabulary& v, const IntBuffer& indices, i64 i, FaultWord& fault) {
  const i64 index = indices.at(i);
  if (index > v.last_index) fault.expect(kIndicesSite, i, index, v.last_index + 1);
  return table_row(v, index);
}

constexpr int num_splits(i64 row_bytes, int vec_bytes) {
  const i64 bytes = i64(INDEX_VECS_PER_SPLIT) * vec_bytes;
  return static_cast<int>((row_bytes + bytes - 1) / bytes);
}

// The variant is 0, or kPages and the size of a head.
template <i64 kRowBytes, int kVecBytes, int kIndexBytes, bool kPaged = false,
          i64 kHeadBytes = kRowBytes>
void add(Specialisations<IndexParams>& list) {
  using Kernel = IndexKernel<kRowBytes, num_splits(kRowBytes, kVecBytes), INDEX_CONFIG, kVecBytes,
                             kIndexBytes, INDEX_IN_FLIGHT, kPaged, kHeadBytes>;
  constexpr int kVariant = kPaged ? kPages + kHeadBytes : 0;
  list.push_back({kRowBytes, kVecBytes, kIndexBytes, kVariant, Kernel::kNumThreads, Kernel::run});
}

template <i64 kRowBytes, int kVecBytes>
void kernels(Specialisations<IndexParams>& list) {
  constexpr int kIndexBytes = index_bytes_in_turn(kRowBytes);
  add<kRowBytes, kVecBytes, kIndexBytes>(list);
  if constexpr (sweeps_all(kRowBytes)) {
    add<kRowBytes, kVecBytes, 12 - kIndexBytes>(list);
    add<kRowBytes, kVecBytes, kIndexBytes, true>(list);
    constexpr i64 kHead = longest_head(kRowBytes, kVecBytes);
    if constexpr (kHead > 0) add<kRowBytes, kVecBytes, 12 - kIndexBytes, true, kHead>(list);
    if constexpr (kHead > kVecBytes) add<kRowBytes, kVecBytes, kIndexBytes, true, kVecBytes>(list);
  }
}
EMULATE_COLLECT(IndexParams, kernels)

void one_run(const Specialisation<IndexParams>& kernel, int run, Random& random) {
  const i64 row_bytes = kernel.row_bytes;
  const int vec_bytes = kernel.vec_bytes;
  const GroupShape shape =
      group_shape(row_bytes, vec_bytes, INDEX_IN_FLIGHT, num_splits(row_bytes, vec_bytes));
  const i64 num_rows = any_num_rows(shape, kernel.num_threads, random);
  const bool is_paged = kernel.variant > kPages;
  const i64 head_bytes = is_paged ? kernel.variant - kPages : row_bytes;
  const i64 least_rows = random.pick({1, 2, 7, 20});
  const CacheLayout layout =
      CacheLayout::any(least_rows, is_paged, row_bytes / head_bytes, 1, random);
  const i64 table_rows = layout.num_slots();

  const Vocabulary vocabulary = any_vocabulary(table_rows, random);
  const std::vector<i64> values = any_indices(vocabulary, num_rows, kernel.index_bytes, random);
  IntBuffer indices("indices", values, kernel.index_bytes);

  Placement weights_at = any_placement(head_bytes, vec_bytes, random);
  weights_at.offset = offset_of_run(kernel, run);
  if (random.below(8) == 0) weights_at.stride_bytes = 0;  // an expanded row
  const Placement output_at = any_placement(row_bytes, vec_bytes, random);
  RowBuffer weights("weights", layout.size(), head_bytes, weights_at, random);
  RowBuffer output("output", num_rows, row_bytes, output_at, random);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < num_rows; ++i) {
    if (const i64 row = expect_index(vocabulary, indices, i, fault); row >= 0) {
      for (i64 head = 0; head < layout.num_heads; ++head) {
        std::memcpy(output.expected(i) + head * head_bytes, weights.row(layout.head(0, row, head)),
                    head_bytes);
      }
    } else {
      std::memset(output.expected(i), 0, row_bytes);
    }
  }
  const CacheStrides strides = layout.strides(weights.stride_bytes());
  const IndexParams params =
      index_params(output, weights.row(0), strides, vocabulary, indices, fault);
  const unsigned blocks = ceil_div(shape.num_threads(num_rows), kernel.num_threads);
  const Rewriter rewriter(indices, {vocabulary.bound});
  run_kernel(kernel, {blocks}, kernel.num_threads, random, params);
  check_all(output, weights, indices, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  return sweep("index", collect(SweepRows()), runs_at_every_offset<IndexParams>, one_run);
}
