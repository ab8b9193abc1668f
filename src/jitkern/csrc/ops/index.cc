// indexing on the host: checks, CPU implementation, launch.
#include "index.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "common.h"
#include "host/cpu_copy.h"

namespace jitkern {

using tvm::ffi::Any;
using tvm::ffi::Array;

namespace {

constexpr const char* kOp = "indexing";
const FaultSite kIndicesSite = fault_site(kOp, "indices");
constexpr i64 kMaxIndex = std::numeric_limits<i64>::max();

// `table` as the rows that `output` has, whose shape is checked later.
CacheRows weights_rows(const Tensor& table, AnyView output, const Indices& indices) {
  const Tensor rows(kOp, "output", output);
  const int row_ndim = std::max(rows.dl->ndim - indices.dl->ndim, 0);
  return CacheRows::of(table, bytes_from(rows, rows.dl->ndim - row_ndim), rows, row_ndim);
}

// `output` as one row for each index. Checks its shape, and devices in the order of the arguments.
Rows output_rows(AnyView value, const Indices& indices, const CacheRows& weights) {
  const bool host_table = !weights.on_cuda() && indices.on_cuda();
  if (!host_table) indices.same_device(weights);
  const Tensor output(kOp, "output", value);
  output.same_device(host_table ? static_cast<const Tensor&>(indices) : weights);
  output.same_dtype(weights);
  const DLTensor& out = *output.dl;
  const DLTensor& in = *indices.dl;
  const DLTensor& table = *weights.dl;
  const int64_t* const row = table.shape + weights.row_dim;
  const int64_t* const row_end = table.shape + table.ndim;
  if (out.ndim != in.ndim + (row_end - row) ||
      !std::equal(in.shape, in.shape + in.ndim, out.shape) ||
      !std::equal(row, row_end, out.shape + in.ndim)) {
    std::vector<int64_t> shape(in.shape, in.shape + in.ndim);
    shape.insert(shape.end(), row, row_end);
    output.shape_error("shape " + shape_text(shape.data(), shape.size()));
  }
  return Rows(output, in.ndim);
}

// A range of indices.
struct Range {
  const char* arg;
  i64 start;
  i64 length;

  i64 end() const { return start + length; }
  std::string text() const { return str("(", start, ", ", length, ")"); }
  bool overlaps(const Range& other) const {
    return length > 0 && other.length > 0 && start < other.end() && other.start < end();
  }
};

// Checks a range (start, length) of at most `num_rows` rows, which are `rows`.
Range range_arg(const char* arg, AnyView value, i64 num_rows, const char* rows) {
  const auto pair = value.as<Array<Any>>();
  if (!pair) raise_type_error(kOp, arg, value, "(start, length)");
  if (pair->size() != 2) {
    raise_value_error(kOp, arg, str("a list of ", pair->size()), "(start, length)");
  }
  Range range{arg, int_arg(kOp, str(arg, "[0]").c_str(), (*pair)[0]), 0};
  range.length = int_arg(kOp, str(arg, "[1]").c_str(), (*pair)[1]);
  // Kernels subtract unsigned: beyond kMaxIndex negative indices would match.
  if (range.start < 0 || range.length < 0 || range.length > num_rows ||
      range.start > kMaxIndex - range.length) {
    raise_value_error(kOp, arg, range.text(),
                      str("(start, length) with start >= 0, start + length < 2^63 and 0 <= length "
                          "<= ",
                          num_rows, ", ", rows));
  }
  return range;
}

// Checks and sets the ranges of indices that read `weights`; by default every row is in range.
void choose_rows(IndexParams& p, AnyView vocab_range, AnyView added_range, AnyView vocab_size,
                 i64 num_rows) {
  if (is_none(vocab_range)) {
    const char* arg = is_none(added_range) ? "vocab_size" : "added_range";
    raise_value_error(kOp, arg, "given without vocab_range", "both");
  }
  const Range vocab = range_arg("vocab_range", vocab_range, num_rows, "the rows of weights");
  Range added{"added_range", 0, 0};
  if (!is_none(added_range)) {
    added = range_arg("added_range", added_range, num_rows - vocab.length,
                      "the rows of weights behind those of vocab_range");
    if (added.overlaps(vocab)) {
      raise_value_error(kOp, added.arg, added.text(), "no index of vocab_range " + vocab.text());
    }
  }
  p.last_index = kMaxIndex;
  if (!is_none(vocab_size)) {
    const i64 size = int_arg(kOp, "vocab_size", vocab_size);
    for (const Range& range : {vocab, added}) {
      if (size >= range.end()) continue;
      raise_value_error(kOp, "vocab_size", std::to_string(size),
                        str("at least ", range.end(), ", the end of ", range.arg));
    }
    p.last_index = size - 1;
  }
  p.vocab_start = vocab.start;
  p.vocab_length = vocab.length;
  p.added_start = added.start;
  p.added_length = added.length;
  p.added_row = vocab.length;
}

struct IndexArgs {
  CacheRows weights;
  Indices indices;
  Rows output;  // a row for each index
  IndexParams params{};

  // `more` is (added_range, vocab_size) or None: each argument from Python takes 15 to 35 ns.
  IndexArgs(AnyView weights_arg, AnyView indices_arg, AnyView output_arg, AnyView vocab_range,
            AnyView more)
      : IndexArgs(Tensor(kOp, "weights", weights_arg), Indices(kOp, "indices", indices_arg),
                  output_arg, vocab_range, more) {}

 private:
  IndexArgs(const Tensor& table, const Indices& indices, AnyView output_arg, AnyView vocab_range,
            AnyView more)
      : weights(weights_rows(table, output_arg, indices)),
        indices(indices),
        output(output_rows(output_arg, indices, weights)) {
    output.distinct_rows();
    CacheRows(output).apart_from(weights);
    indices.apart_from(output);
    params.output = output.data;
    params.weights = weights.data;
    params.output_stride_bytes = output.stride_bytes;
    params.strides = weights.strides();
    params.indices = indices.data;
    params.num_rows = indices.count;
    params.vocab_length = weights.num_rows;
    params.last_index = weights.num_rows - 1;
    params.indices_site = kIndicesSite;
    Any added_range, vocab_size;
    if (!is_none(more)) {
      const auto options = more.cast<Array<Any>>();
      added_range = options[0];
      vocab_size = options[1];
    }
    if (is_none(vocab_range) && is_none(added_range) && is_none(vocab_size)) return;
    choose_rows(params, vocab_range, added_range, vocab_size, weights.num_rows);
  }
};

void index_pages_cpu(const IndexArgs& args) {
  const IndexParams& p = args.params;
  const CacheRows& weights = args.weights;
  args.indices.with_index([&](const auto index_at) {
    for (i64 i = 0; i < p.num_rows; ++i) {
      const i64 row = table_row(p, index_at(i));
      for (i64 head = 0; head < weights.num_heads; ++head) {
        char* const target = p.output + i * p.output_stride_bytes + head * weights.head_bytes;
        const auto bytes = static_cast<size_t>(weights.head_bytes);
        if (row < 0) std::memset(target, 0, bytes);
        if (row >= 0) std::memcpy(target, weights.row(row) + head * weights.head_stride, bytes);
      }
    }
  });
}

void index_cpu(const IndexArgs& args) {
  const IndexParams& p = args.params;
  if (args.weights.row_bytes == 0) return;
  const DLTensor& table = *args.weights.dl;
  const bool may_be_pages = table.ndim >= 3 && args.weights.row_dim == 1;
  if (p.last_index < kMaxIndex) {
    args.indices.check_below(p.last_index + 1, may_be_pages ? table.shape[0] * table.shape[1] : 0,
                             "; for slots of pages pass output=");
  }
  if (!args.weights.is_flat()) return index_pages_cpu(args);
  args.indices.with_index([&](const auto index_at) {
    copy_rows(p.num_rows, args.weights.row_bytes, [&p, index_at](i64 i) {
      const i64 row = table_row(p, index_at(i));
      return CpuRow{p.output + i * p.output_stride_bytes,
                    row >= 0 ? p.weights + row * p.strides.slot_stride : nullptr};
    });
  });
}

// Tables in host memory are read in place. ValueError if one is not pinned.
void index_cuda(IndexArgs& args) {
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes", "paged", "head_bytes"},
                             row_shape);
  const LaunchScope scope(args.indices);
  IndexParams& params = args.params;
  params.weights = address_on_gpu(args.weights);
  const u64 bits = address(params.weights) | address(params.output) | args.weights.stride_bits() |
                   static_cast<u64>(params.output_stride_bytes);
  const Spec spec(args.weights.row_bytes, widest_vec(bits), args.indices.index_bytes,
                  !args.weights.is_flat(), args.weights.head_bytes);
  launch_rows(kernels, scope, spec, params.num_rows, params);
}

void index(AnyView weights, AnyView indices, AnyView output, AnyView vocab_range, AnyView more) {
  IndexArgs args(weights, indices, output, vocab_range, more);
  if (!args.indices.on_cuda()) return index_cpu(args);
  index_cuda(args);
}

// Returns true if PyTorch has to see the call, or to make the indices contiguous.
bool index_unless_torch(AnyView weights, AnyView indices, AnyView output, AnyView vocab_range,
                        AnyView more) {
  if (torch_has_to_see_it() || may_be_lazy(weights) || may_be_lazy(output)) return true;
  const Tensor checked(kOp, "indices", indices);
  if (checked.numel() > 0 && !tvm::ffi::IsContiguous(*checked.dl)) return true;
  index(weights, indices, output, vocab_range, more);
  return false;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexing, index_unless_torch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexing_now, index);

}  // namespace

}  // namespace jitkern
