// gather_rows on the host: rows of a cache in a format, as values of a floating-point type.
#include <jitkern/launch.h>

#include "formats_host.h"

namespace jitkern {

namespace {

constexpr ListArg kRows{"outputs", {"outputs[0]", "outputs[1]"}};
constexpr const char* kOp = "gather_rows";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

void gather_by_cpu(const FormatCall& call, i64 count) {
  const FormatParams& p = call.params;
  call.indices.with_index([&](const auto index_at) {
    for (i64 row = 0; row < count; ++row) {
      const i64 index = index_at(row);
      if (index >= p.num_slots) raise_index_error(kOp, "indices", row, index, p.num_slots);
    }
    for (i64 row = 0; row < count; ++row) {
      const i64 index = index_at(row);
      const i64 slot = is_below(index, p.num_slots) ? index : -1;
      for (int t = 0; t < call.num_tables; ++t) {
        gather_row(p.tables[t], call.row, call.shapes[t], row, slot);
      }
    }
  });
}

void gather_rows(AnyView caches, AnyView indices_arg, AnyView outputs, AnyView format_number,
                 AnyView scales, AnyView count_arg) {
  const int format = format_number.cast<int>();
  const RowsArgs args(kOp, kRows, caches, outputs, scales, format);
  const Indices indices(kOp, "indices", indices_arg);
  const CountArg count(kOp, count_arg, indices);
  FormatCall call(kOp, format, indices, false);
  call.params.indices_site = kIndicesSite;
  if (count.indices) call.uses(*count.indices, false);
  args.add_to(call);
  if (!indices.on_cuda()) return gather_by_cpu(call, count.read(indices.count));
  count.give_to(call.params);
  static KernelTable kernels(kOp, format_spec(), format_shape);
  call.launch(kernels, LaunchScope(indices));
}

JITKERN_EXPORT_OP(gather_rows, gather_rows);

}  // namespace

}  // namespace jitkern
