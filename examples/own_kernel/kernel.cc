// kernel.cu for tensors on the CPU: the same arguments, checked in the same way.
template <int kDim>
void dequantise_on_cpu(tvm::ffi::TensorView x, tvm::ffi::TensorView scale,
                       tvm::ffi::TensorView out, int64_t rows) {
  const int8_t* from = static_cast<const int8_t*>(x.data_ptr());
  const float* scales = static_cast<const float*>(scale.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = row * kDim; i < (row + 1) * kDim; ++i) to[i] = from[i] * scales[row];
  }
}
