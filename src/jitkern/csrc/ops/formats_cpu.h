// Rows of a cache in a format, stored and gathered on the CPU; the emulation of the kernels
// compares with them.
#pragma once

#include <cstring>
#include <type_traits>

#include "formats.h"

namespace jitkern {

// What a kernel is compiled for, beside the types of indices and the width of vectors.
struct FormatShape {
  i64 groups;
  i64 group;
  i64 rest_bytes;
  int type;

  bool operator==(const FormatShape& other) const {
    return groups == other.groups && group == other.group && rest_bytes == other.rest_bytes &&
           type == other.type;
  }
};

// Calls `use` with a constant of the FloatType `type`.
template <class Use>
void with_float_type(int type, const Use& use) {
  type == kFloat32   ? use(std::integral_constant<int, kFloat32>())
  : type == kFloat16 ? use(std::integral_constant<int, kFloat16>())
                     : use(std::integral_constant<int, kBFloat16>());
}

// Where the scale of a group lies.
inline char* scale_address(const FormatTable& table, const RowFormat& format, i64 slot, i64 group) {
  char* const first = table.scales + group * table.scale_strides.head_stride;
  return format.is_given() ? first : first + table.scale_strides.offset_of<true>(slot);
}

template <int kType>
void store_row_as(const FormatTable& table, const RowFormat& format, const ScaleRule& rule,
                  const FormatShape& shape, i64 row, i64 slot) {
  for (i64 g = 0; g < shape.groups; ++g) {
    const auto* values = reinterpret_cast<const Bits<kType>*>(
        table.values + row * table.values_row_stride + g * table.values_group_stride);
    char* const scale_at = scale_address(table, format, slot, g);
    float scale;
    if (format.is_given()) {
      scale = load_scale(format, scale_at);
    } else {
      float amax = 0;
      for (i64 i = 0; i < shape.group; ++i) {
        amax = larger_magnitude(amax, float_of<kType>(values[i]));
      }
      scale = scale_of(amax, format.largest(), rule);
      store_scale(format, scale_at, scale);
    }
    const float inverse = 1.0f / scale;
    auto* payload = reinterpret_cast<unsigned char*>(table.payload) +
                    table.strides.offset_of<true>(slot) + g * table.strides.head_stride;
    for (i64 i = 0; i < shape.group; ++i) {
      const float value = float_of<kType>(values[i]);
      // Given scales divide, as in vLLM; the others multiply by the inverse.
      const float scaled = format.is_given() ? value / scale : value * inverse;
      payload[i] = format.is_int8 ? int8_bits(scaled) : bits_as<kFloat8E4M3>(scaled);
    }
  }
  if (shape.rest_bytes == 0) return;
  std::memcpy(table.payload + table.strides.offset_of<true>(slot) + table.rest_offset,
              table.rest + row * table.rest_row_stride, static_cast<size_t>(shape.rest_bytes));
}

inline void store_row(const FormatTable& table, const RowFormat& format, const ScaleRule& rule,
                      const FormatShape& shape, i64 row, i64 slot) {
  with_float_type(shape.type, [&](const auto type) {
    store_row_as<decltype(type)::value>(table, format, rule, shape, row, slot);
  });
}

// `slot` -1: zeros.
template <int kType>
void gather_row_as(const FormatTable& table, const RowFormat& format, const FormatShape& shape,
                   i64 row, i64 slot) {
  const i64 offset = slot < 0 ? 0 : table.strides.offset_of<true>(slot);
  for (i64 g = 0; g < shape.groups; ++g) {
    auto* values = reinterpret_cast<Bits<kType>*>(table.values + row * table.values_row_stride +
                                                  g * table.values_group_stride);
    if (slot < 0) {
      std::memset(values, 0, static_cast<size_t>(shape.group) * sizeof(*values));
      continue;
    }
    const float scale = load_scale(format, scale_address(table, format, slot, g));
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

inline void gather_row(const FormatTable& table, const RowFormat& format, const FormatShape& shape,
                       i64 row, i64 slot) {
  with_float_type(shape.type, [&](const auto type) {
    gather_row_as<decltype(type)::value>(table, format, shape, row, slot);
  });
}

}  // namespace jitkern
