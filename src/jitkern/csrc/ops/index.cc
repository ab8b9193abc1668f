// indexing on the host: checks, CPU implementation, launch.
#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <limits>
#include <string>

#include "host/cpu_copy.h"
#include "index_args.h"

namespace jitkern {

using tvm::ffi::Any;
using tvm::ffi::Array;

namespace {

constexpr const char* kOp = "indexing";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

// No index is larger.
constexpr i64 kMaxIndex = std::numeric_limits<i64>::max();

void index_cpu(const Indices& indices, const IndexParams& p, i64 row_bytes) {
  if (row_bytes == 0) return;
  if (p.last_index < kMaxIndex) indices.check_below(p.last_index + 1);
  indices.with_index([&](const auto index_at) {
    copy_rows<kRandomSources>(p.num_rows, row_bytes, p.num_rows * row_bytes, [&p, index_at](i64 i) {
      const i64 row = table_row(p, index_at(i));
      return CpuRow{p.output + i * p.output_stride_bytes,
                    row >= 0 ? p.weights + row * p.weights_stride_bytes : nullptr};
    });
  });
}

// `output` as one row for each index. ValueError unless it is of that shape.
Rows output_rows(const Tensor& output, const Indices& indices, const Rows& weights) {
  output.same_dtype(weights);
  const DLTensor& out = *output.dl;
  const DLTensor& in = *indices.dl;
  const DLTensor& table = *weights.dl;
  if (out.ndim != in.ndim + table.ndim - 1 ||
      !std::equal(in.shape, in.shape + in.ndim, out.shape) ||
      !std::equal(table.shape + 1, table.shape + table.ndim, out.shape + in.ndim)) {
    std::vector<int64_t> shape(in.shape, in.shape + in.ndim);
    shape.insert(shape.end(), table.shape + 1, table.shape + table.ndim);
    output.value_error("shape " + output.shape_text(),
                       "shape " + shape_text(shape.data(), shape.size()));
  }
  return Rows(output, in.ndim);
}

// Checks where the three lie, in the order of the arguments.
Rows output_rows(AnyView value, const Indices& indices, const Rows& weights) {
  const bool host_table = !weights.on_cuda() && indices.on_cuda();
  if (!host_table) indices.same_device(weights);
  const Tensor output(kOp, "output", value);
  output.same_device(host_table ? static_cast<const Tensor&>(indices) : weights);
  return output_rows(output, indices, weights);
}

// Of indices.
struct Range {
  const char* arg;
  i64 start;
  i64 length;

  u64 end() const { return static_cast<u64>(start) + static_cast<u64>(length); }
  std::string text() const {
    return "(" + std::to_string(start) + ", " + std::to_string(length) + ")";
  }
  bool meets(const Range& other) const {
    return length > 0 && other.length > 0 && static_cast<u64>(start) < other.end() &&
           static_cast<u64>(other.start) < end();
  }
  // No index is behind kMaxIndex. A range that went on there would hold negative ones: kernels
  // subtract its start without a sign.
  i64 length_in_use() const {
    const u64 last_end = static_cast<u64>(kMaxIndex) + 1;
    return static_cast<i64>(std::min(end(), last_end) - static_cast<u64>(start));
  }
};

struct RangeNames {
  const char* range;
  const char* start;
  const char* length;
  const char* rows;  // what it may have
};
constexpr RangeNames kVocabRange = {"vocab_range", "vocab_range[0]", "vocab_range[1]",
                                    "the rows of weights"};
constexpr RangeNames kAddedRange = {"added_range", "added_range[0]", "added_range[1]",
                                    "the rows of weights behind those of vocab_range"};

// (start, length) of `num_rows` rows at most.
Range range_arg(const RangeNames& names, AnyView value, i64 num_rows) {
  const auto given = value.as<Array<Any>>();
  if (!given || given->size() != 2) raise_type_error(kOp, names.range, value, "(start, length)");
  Range range{names.range, int_arg(kOp, names.start, (*given)[0]), 0};
  range.length = int_arg(kOp, names.length, (*given)[1]);
  if (range.start < 0 || range.length < 0 || range.length > num_rows) {
    raise_value_error(kOp, names.range, range.text(),
                      "(start, length) with start >= 0 and 0 <= length <= " +
                          std::to_string(num_rows) + ", " + names.rows);
  }
  return range;
}

// Checks which indices are rows of `weights`, where not simply all of its rows are.
void choose_rows(IndexParams& p, const VocabularyArgs& given, i64 num_rows) {
  if (is_none(given.vocab_range)) {
    const char* arg = is_none(given.added_range) ? "vocab_size" : "added_range";
    raise_value_error(kOp, arg, "given without vocab_range", "both");
  }
  const Range vocab = range_arg(kVocabRange, given.vocab_range, num_rows);
  Range added{kAddedRange.range, 0, 0};
  if (!is_none(given.added_range)) {
    added = range_arg(kAddedRange, given.added_range, num_rows - vocab.length);
    if (added.meets(vocab)) {
      raise_value_error(kOp, added.arg, added.text(), "no index of vocab_range " + vocab.text());
    }
  }
  p.last_index = kMaxIndex;
  if (!is_none(given.vocab_size)) {
    const i64 size = int_arg(kOp, "vocab_size", given.vocab_size);
    for (const Range& range : {vocab, added}) {
      if (size >= 0 && static_cast<u64>(size) >= range.end()) continue;
      raise_value_error(kOp, "vocab_size", std::to_string(size),
                        "at least " + std::to_string(range.end()) + ", the end of " + range.arg);
    }
    p.last_index = size - 1;
  }
  p.vocab_start = vocab.start;
  p.vocab_length = vocab.length_in_use();
  p.added_start = added.start;
  p.added_length = added.length_in_use();
  p.added_row = vocab.length;
}

}  // namespace

VocabularyArgs::VocabularyArgs(AnyView range, AnyView more) : vocab_range(range) {
  if (is_none(more)) return;
  const auto given = more.cast<Array<Any>>();
  added_range = given[0];
  vocab_size = given[1];
}

IndexArgs::IndexArgs(AnyView weights_arg, AnyView indices_arg, AnyView output_arg,
                     const VocabularyArgs& vocabulary)
    : weights(kOp, "weights", weights_arg),
      indices(kOp, "indices", indices_arg),
      output(output_rows(output_arg, indices, weights)),
      params{output.data,
             weights.data,
             output.stride_bytes,
             weights.stride_bytes,
             indices.data,
             indices.count,
             0,
             weights.num_rows,
             0,
             0,
             0,
             weights.num_rows - 1,
             kIndicesSite,
             nullptr} {
  output.distinct_rows();
  output.apart_from(weights);
  indices.apart_from(output);
  if (!vocabulary.all()) choose_rows(params, vocabulary, weights.num_rows);
}

void launch_index(const LaunchScope& scope, const IndexArgs& args) {
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes"}, row_shape);
  IndexParams params = args.params;
  const u64 bits = address(params.weights) | address(params.output) |
                   static_cast<u64>(args.weights.row_bytes | params.weights_stride_bytes |
                                    params.output_stride_bytes);
  const Spec spec(args.weights.row_bytes, widest_vec(bits), args.indices.index_bytes);
  launch_rows(kernels, scope, spec, params.num_rows, params);
}

namespace {

void index(AnyView weights, AnyView indices, AnyView output, AnyView vocab_range, AnyView more) {
  IndexArgs args(weights, indices, output, {vocab_range, more});
  if (!args.indices.on_cuda()) return index_cpu(args.indices, args.params, args.weights.row_bytes);
  if (args.is_host_table()) return index_host_table(args);
  launch_index(LaunchScope(args.indices), args);
}

JITKERN_EXPORT_OP(indexing, index);

}  // namespace

}  // namespace jitkern
