// store_rows on the host: rows of several parts, and rows in the formats of engines.
#include <jitkern/launch.h>

#include "formats_host.h"
#include "store_host.h"

namespace jitkern {

namespace {

constexpr ListArg kRows{"parts", {"parts[0]", "parts[1]"}};
constexpr const char* kOp = "store_rows";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

void store_by_cpu(const FormatCall& call) {
  const FormatParams& p = call.params;
  check_indices(call.indices, p.num_slots, p.skip);
  call.indices.with_index([&](const auto index_at) {
    for (i64 row = 0; row < p.num_rows; ++row) {
      const i64 slot = index_at(row);
      if (!is_below(slot, p.num_slots) || slot == p.skip) continue;
      for (int t = 0; t < call.num_tables; ++t) {
        store_row(p.tables[t], call.row, p.rule, call.shapes[t], row, slot);
      }
    }
  });
}

// Whether scales are rounded up to powers of two: as the format has it, or as the caller says.
ScaleRule scale_rule_arg(const RowFormat& format, AnyView value) {
  ScaleRule rule = format.rule;
  if (is_none(value)) return rule;
  const bool pow2 = choice_arg(kOp, "scale_rule", value, {"pow2", "fp32"}) == 0;
  if (!format.has_other_rule) {
    raise_value_error(kOp, "scale_rule", "given", "None: this format has one rule");
  }
  rule.pow2 = pow2;
  if (!pow2) rule.scale_floor = 0;
  return rule;
}

void store_rows(AnyView caches, AnyView indices_arg, AnyView parts, AnyView format_number,
                AnyView scales, AnyView scale_rule, AnyView skip_value) {
  const int format = format_number.cast<int>();
  const RowsArgs args(kOp, kRows, caches, parts, scales, format);
  const Indices indices(kOp, "indices", indices_arg);
  const i64 skip = skip_arg(kOp, skip_value);
  if (format == kNoFormat) {
    if (!is_none(scale_rule)) {
      raise_value_error(kOp, "scale_rule", "given without a format", "None");
    }
    return store_parts(args.caches, indices, args.rows, skip, kIndicesSite);
  }
  FormatCall call(kOp, format, indices, true);
  call.params.rule = scale_rule_arg(call.row, scale_rule);
  call.params.skip = skip;
  call.params.indices_site = kIndicesSite;
  args.add_to(call);
  if (!indices.on_cuda()) return store_by_cpu(call);
  static KernelTable kernels(kOp, format_spec(), format_shape);
  call.launch(kernels, LaunchScope(indices));
}

JITKERN_EXPORT_OP(store_rows, store_rows);

}  // namespace

}  // namespace jitkern
