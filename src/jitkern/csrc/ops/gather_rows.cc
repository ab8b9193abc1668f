// gather_rows on the host: rows of a cache in a format, as values of a floating-point type.
#include <jitkern/launch.h>

#include <cstring>

#include "formats_host.h"

namespace jitkern {

namespace {

constexpr ListArg kRows{"outputs", {"outputs[0]", "outputs[1]"}};
constexpr const char* kOp = "gather_rows";
const FaultSite kIndicesSite = fault_site(kOp, "indices");

// `slot` -1: zeros.
template <int kType>
void gather_table(const FormatCall& call, const FormatTable& table, const FormatShape& shape,
                  i64 row, i64 slot) {
  const RowFormat& format = call.row;
  const i64 offset = slot < 0 ? 0 : table.strides.offset_of<true>(slot);
  for (i64 g = 0; g < shape.groups; ++g) {
    auto* values = reinterpret_cast<Bits<kType>*>(table.values + row * table.values_row_stride +
                                                  g * table.values_group_stride);
    if (slot < 0) {
      std::memset(values, 0, static_cast<size_t>(shape.group) * sizeof(*values));
      continue;
    }
    const char* scale_at = table.scales + g * table.scale_strides.head_stride;
    if (!format.is_given()) scale_at += table.scale_strides.offset_of<true>(slot);
    const float scale = load_scale(format, scale_at);
    const auto* payload = reinterpret_cast<const unsigned char*>(table.payload) + offset +
                          g * table.strides.head_stride;
    for (i64 i = 0; i < shape.group; ++i) {
      const float value = format.is_int8 ? static_cast<float>(static_cast<signed char>(payload[i]))
                                         : float_of<kFloat8E4M3>(payload[i]);
      values[i] = bits_as<kType>(value * scale);
    }
  }
  if (shape.rest_bytes == 0) return;
  char* rest = table.rest + row * table.rest_row_stride;
  const auto bytes = static_cast<size_t>(shape.rest_bytes);
  if (slot < 0) std::memset(rest, 0, bytes);
  if (slot >= 0) std::memcpy(rest, table.payload + offset + table.rest_offset, bytes);
}

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
        with_float_type(call.shapes[t].type, [&](const auto type) {
          gather_table<decltype(type)::value>(call, p.tables[t], call.shapes[t], row, slot);
        });
      }
    }
  });
}

void gather_rows(AnyView caches, AnyView indices_arg, AnyView outputs, AnyView format_number,
                 AnyView scales, AnyView count_arg) {
  const int format = format_number.cast<int>();
  if (format == kNoFormat) raise_type_error(kOp, "format", nullptr, "the name of a format");
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
