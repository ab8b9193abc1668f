// indexing on the host: checks, CPU implementation, launch.
#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <iterator>
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
      // Without a sign, so that one comparison also sends negative indices outside.
      const u64 row = u64(index_at(i)) - u64(p.vocab_start);
      const bool inside = row < u64(p.vocab_length);
      return CpuRow{p.output + i * p.output_stride_bytes,
                    inside ? p.weights + i64(row) * p.weights_stride_bytes : nullptr};
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
Rows output_rows(const char* name, AnyView value, const Indices& indices, const Rows& weights) {
  const bool host_table = !weights.on_cuda() && indices.on_cuda();
  if (!host_table) indices.same_device(weights);
  const Tensor output(kOp, name, value);
  output.same_device(host_table ? static_cast<const Tensor&>(indices) : weights);
  return output_rows(output, indices, weights);
}

}  // namespace

IndexArgs::IndexArgs(Names names, AnyView weights_arg, AnyView indices_arg, AnyView output_arg,
                     AnyView start_arg, AnyView length_arg)
    : weights(kOp, names.weights, weights_arg),
      indices(kOp, "indices", indices_arg),
      output(output_rows(names.output, output_arg, indices, weights)),
      params{output.data,
             weights.data,
             output.stride_bytes,
             weights.stride_bytes,
             indices.data,
             indices.count,
             0,
             weights.num_rows,
             weights.num_rows - 1,
             kIndicesSite,
             nullptr} {
  output.distinct_rows();
  output.apart_from(weights);
  indices.apart_from(output);
  if (is_none(start_arg)) return;
  params.vocab_start = int_arg(kOp, "vocab_range[0]", start_arg);
  params.vocab_length = int_arg(kOp, "vocab_range[1]", length_arg);
  params.last_index = kMaxIndex;
  if (params.vocab_start < 0 || params.vocab_length < 0 || params.vocab_length > weights.num_rows) {
    raise_value_error(
        kOp, "vocab_range",
        "(" + std::to_string(params.vocab_start) + ", " + std::to_string(params.vocab_length) + ")",
        "(start, length) with start >= 0 and 0 <= length <= " + std::to_string(weights.num_rows) +
            ", the rows of weights");
  }
  // No index is behind kMaxIndex. A range that goes on there would hold negative ones: kernels
  // subtract its start without a sign.
  const u64 behind_start = static_cast<u64>(kMaxIndex) + 1 - static_cast<u64>(params.vocab_start);
  params.vocab_length = std::min(static_cast<u64>(params.vocab_length), behind_start);
}

void launch_index(const IndexArgs& args) {
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes"}, row_shape);
  IndexParams params = args.params;
  const u64 bits = address(params.weights) | address(params.output) |
                   static_cast<u64>(args.weights.row_bytes | params.weights_stride_bytes |
                                    params.output_stride_bytes);
  const Spec spec(args.weights.row_bytes, widest_vec(bits), args.indices.index_bytes);
  launch_rows(kernels, args.indices, spec, params.num_rows, params);
}

namespace {

void index(AnyView weights, AnyView indices, AnyView output, AnyView start, AnyView length) {
  IndexArgs args({"weights", "output"}, weights, indices, output, start, length);
  if (!args.indices.on_cuda()) return index_cpu(args.indices, args.params, args.weights.row_bytes);
  if (!args.is_host_table()) return launch_index(args);
  std::vector<IndexArgs> tables{args};
  index_host_tables(tables);
}

constexpr IndexArgs::Names kNames[] = {
    {"weights[0]", "output[0]"}, {"weights[1]", "output[1]"}, {"weights[2]", "output[2]"},
    {"weights[3]", "output[3]"}, {"weights[4]", "output[4]"}, {"weights[5]", "output[5]"},
    {"weights[6]", "output[6]"}, {"weights[7]", "output[7]"},
};

// ValueError where a table lies elsewhere or has other rows than the first, or where memory that is
// written is read or written for another one.
void check_together(const std::vector<IndexArgs>& tables) {
  const IndexArgs& first = tables[0];
  for (const IndexArgs& args : tables) {
    args.weights.same_device(first.weights);
    if (args.weights.num_rows != first.weights.num_rows) {
      args.weights.value_error(std::to_string(args.weights.num_rows) + " rows",
                               std::to_string(first.weights.num_rows) + " rows as in weights[0]");
    }
    for (const IndexArgs& other : tables) {
      if (&args == &other) continue;
      args.output.apart_from(other.weights);
      if (&args > &other) args.output.apart_from(other.output);
    }
  }
}

// Several tables of as many rows, by the same indices.
void index_together(Array<Any> weights, AnyView indices, Array<Any> outputs, AnyView start,
                    AnyView length) {
  if (weights.empty() || weights.size() > std::size(kNames)) {
    raise_value_error(kOp, "weights", "a tuple of " + std::to_string(weights.size()),
                      "1 to " + std::to_string(std::size(kNames)) + " tables");
  }
  if (outputs.size() != weights.size()) {
    raise_value_error(kOp, "output", "a tuple of " + std::to_string(outputs.size()),
                      std::to_string(weights.size()) + ", one for each table");
  }
  std::vector<IndexArgs> tables;
  tables.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    tables.emplace_back(kNames[i], weights[i], indices, outputs[i], start, length);
  }
  check_together(tables);
  if (tables[0].is_host_table()) return index_host_tables(tables);
  for (const IndexArgs& args : tables) {
    if (args.indices.on_cuda()) {
      launch_index(args);
    } else {
      index_cpu(args.indices, args.params, args.weights.row_bytes);
    }
  }
}

JITKERN_EXPORT_OP(indexing, index);
JITKERN_EXPORT_OP(indexing_together, index_together);

}  // namespace

}  // namespace jitkern
