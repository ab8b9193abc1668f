// write_twice on the host: checks, CPU implementation, launch.
#include "twice.h"

#include <jitkern/launch.h>

#include <string>

#include "host/cpu_copy.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "write_twice";

void twice_cpu(const TwiceParams& p, i64 row_bytes) {
  if (row_bytes == 0) return;
  copy_rows(2 * p.num_rows, row_bytes, [&](i64 i) {
    return CpuRow{p.output + i * p.output_stride_bytes, p.rows + i / 2 * p.row_stride_bytes};
  });
}

void twice(AnyView rows_arg, AnyView output_arg) {
  const Rows rows(kOp, "rows", rows_arg);
  const Rows output(kOp, "output", output_arg);
  output.same_device(rows);
  output.same_dtype(rows);
  output.same_row_bytes(rows);
  if (output.num_rows != 2 * rows.num_rows) {
    output.value_error(std::to_string(output.num_rows) + " rows",
                       std::to_string(2 * rows.num_rows) + ", two for each of rows");
  }
  TwiceParams params{output.data,       rows.data,     output.stride_bytes,
                     rows.stride_bytes, rows.num_rows, nullptr};
  if (!rows.on_cuda()) return twice_cpu(params, rows.row_bytes);
  static KernelTable kernels(kOp, {"row_bytes", "vec_bytes"}, row_shape);
  const Spec spec(rows.row_bytes, vec_bytes_for(rows, output));
  launch_rows(kernels, LaunchScope(rows), spec, rows.num_rows, params);
}

JITKERN_EXPORT_OP(write_twice, twice);

}  // namespace

}  // namespace jitkern
