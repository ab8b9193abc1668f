// indexing on the host: checks, CPU implementation, launch.
#include "index.h"

#include <jitkern/cpu_copy.h>
#include <jitkern/launch.h>
#include <tvm/ffi/function.h>

#include <limits>
#include <string>

namespace jitkern {

namespace {

constexpr const char* kOp = "indexing";

template <class Index>
void index_cpu(const IndexParams& p, i64 row_bytes) {
  const auto* indices = static_cast<const Index*>(p.indices);
  for (i64 i = 0; i < p.num_rows; ++i) {
    if (indices[i] >= p.bound) {
      raise_index_error(kOp, "indices", i, indices[i], p.bound, "; nothing was written");
    }
  }
  copy_rows<kRandomSources>(p.num_rows, row_bytes, p.num_rows * row_bytes, [&](i64 i) {
    const i64 row = indices[i] < 0 ? -1 : indices[i] - p.vocab_start;
    const bool inside = row >= 0 && row < p.vocab_length;
    return CpuRow{p.output + i * p.output_stride_bytes,
                  inside ? p.weights + row * p.weights_stride_bytes : nullptr};
  });
}

// `output` must be [*indices.shape, *weights.shape[1:]].
void check_output_shape(const Tensor& output, const Tensor& indices, const Tensor& weights) {
  const int index_dims = indices.dl->ndim;
  const int row_dims = weights.dl->ndim - 1;
  bool same = output.dl->ndim == index_dims + row_dims;
  std::string expected = "[";
  for (int d = 0; d < index_dims + row_dims; ++d) {
    const i64 size = d < index_dims ? indices.dl->shape[d] : weights.dl->shape[d - index_dims + 1];
    expected += (d ? ", " : "") + std::to_string(size);
    same = same && output.dl->shape[d] == size;
  }
  if (!same) output.value_error("shape " + output.shape_text(), "shape " + expected + "]");
}

// vocab_start and vocab_length are -1 where no vocab_range was given.
void index(AnyView weights_arg, AnyView indices_arg, AnyView output_arg, AnyView start_arg,
           AnyView length_arg) {
  const Tensor weights(kOp, "weights", weights_arg);
  const Tensor indices_tensor(kOp, "indices", indices_arg);
  const Tensor output(kOp, "output", output_arg);
  indices_tensor.same_device(weights);
  output.same_device(weights);
  output.same_dtype(weights);
  const Indices indices(indices_tensor);
  const Rows table(weights);
  check_output_shape(output, indices_tensor, weights);
  const Rows rows(output, indices_tensor.dl->ndim);
  IndexParams params{rows.data,     table.data, rows.stride_bytes, table.stride_bytes, indices.data,
                     indices.count, 0,          table.num_rows,    table.num_rows,     nullptr};
  if (start_arg.type_index() != tvm::ffi::TypeIndex::kTVMFFINone) {
    params.vocab_start = int_arg(kOp, "vocab_range[0]", start_arg);
    params.vocab_length = int_arg(kOp, "vocab_range[1]", length_arg);
    params.bound = std::numeric_limits<i64>::max();
    if (params.vocab_start < 0 || params.vocab_length < 0 || params.vocab_length > table.num_rows) {
      raise_value_error(kOp, "vocab_range",
                        "(" + std::to_string(params.vocab_start) + ", " +
                            std::to_string(params.vocab_length) + ")",
                        "(start, length) with start >= 0 and 0 <= length <= " +
                            std::to_string(table.num_rows) + ", the rows of weights");
    }
  }
  const i64 row_bytes = table.row_bytes;
  const bool empty = row_bytes == 0 || indices.count == 0;
  if (!weights.on_cuda()) {
    if (empty) return;
    indices.index_bytes == 4 ? index_cpu<int32_t>(params, row_bytes)
                             : index_cpu<int64_t>(params, row_bytes);
    return;
  }
  static KernelTable kernels("index", {"index"});
  const LaunchScope scope(weights);
  if (empty) return;
  params.fault = scope.device.fault_device;
  const int vec_bytes = vec_bytes_for(row_bytes, address(rows.data), address(table.data),
                                      rows.stride_bytes, table.stride_bytes);
  const Kernel& kernel = *kernels.find(scope.device, {row_bytes, vec_bytes, indices.index_bytes});
  const GroupShape shape = group_shape(row_bytes, vec_bytes, kIndexMaxChunks, kIndexInFlight);
  scope.launch(kernel, ceil_div(shape.num_threads(indices.count), kernel.num_threads), 1,
               kernel.num_threads, params, scope.device.use_pdl);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index, index);

}  // namespace

}  // namespace jitkern
