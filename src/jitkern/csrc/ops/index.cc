// indexing on the host: checks, CPU implementation, launch.
#include "index.h"

#include <jitkern/launch.h>

#include <algorithm>
#include <limits>
#include <string>

#include "host/cpu_copy.h"

namespace jitkern {

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
  output.same_device(weights);
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

// Start and length are None where no vocab_range was given.
void index(AnyView weights_arg, AnyView indices_arg, AnyView output_arg, AnyView start_arg,
           AnyView length_arg) {
  const Rows weights(kOp, "weights", weights_arg);
  const Indices indices(kOp, "indices", indices_arg);
  indices.same_device(weights);
  const Rows output = output_rows(Tensor(kOp, "output", output_arg), indices, weights);
  output.distinct_rows();
  output.apart_from(weights);
  indices.apart_from(output);
  IndexParams params{output.data,
                     weights.data,
                     output.stride_bytes,
                     weights.stride_bytes,
                     indices.data,
                     indices.count,
                     0,
                     weights.num_rows,
                     weights.num_rows - 1,
                     kIndicesSite,
                     nullptr};
  if (!is_none(start_arg)) {
    params.vocab_start = int_arg(kOp, "vocab_range[0]", start_arg);
    params.vocab_length = int_arg(kOp, "vocab_range[1]", length_arg);
    params.last_index = kMaxIndex;
    if (params.vocab_start < 0 || params.vocab_length < 0 ||
        params.vocab_length > weights.num_rows) {
      raise_value_error(kOp, "vocab_range",
                        "(" + std::to_string(params.vocab_start) + ", " +
                            std::to_string(params.vocab_length) + ")",
                        "(start, length) with start >= 0 and 0 <= length <= " +
                            std::to_string(weights.num_rows) + ", the rows of weights");
    }
    // No index is behind kMaxIndex. A range that goes on there would hold negative ones: kernels
    // subtract its start without a sign.
    const u64 behind_start = static_cast<u64>(kMaxIndex) + 1 - static_cast<u64>(params.vocab_start);
    params.vocab_length = std::min(static_cast<u64>(params.vocab_length), behind_start);
  }
  if (!weights.on_cuda()) return index_cpu(indices, params, weights.row_bytes);
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes", "index_bytes"}, row_shape);
  const Spec spec(weights.row_bytes, vec_bytes_for(weights, output), indices.index_bytes);
  launch_rows(kernels, weights, spec, indices.count, params);
}

JITKERN_EXPORT_OP(indexing, index);

}  // namespace

}  // namespace jitkern
