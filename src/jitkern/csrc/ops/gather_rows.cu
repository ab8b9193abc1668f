// gather_rows on the device: row i of the output is slot indices[i] of a cache in a format, as
// values of a floating-point type, with the rest of the row.
#include <jitkern/pdl.cuh>

#include "floats.cuh"
#include "formats.h"

namespace jitkern {

template <int kFormat, int kGroups, int kGroup, int kRestBytes, int kType, int kElems,
          int kIndexBytes, int kThreads, int kMaxOccupancy, bool kUsePdl>
struct GatherRowsKernel {
  using Params = FormatParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static constexpr RowFormat kRow = row_format(kFormat);
  static constexpr FormatLanes kLanes = FormatLanes(kGroups, kGroup, kRestBytes, kElems);
  // A lane stores its values by vectors of at most 16 bytes.
  static constexpr int kStoreElems =
      kElems * item_bytes_of(kType) > 16 ? 16 / item_bytes_of(kType) : kElems;

  static __device__ void run(const Params& p) {
    const FormatTable& table = p.tables[blockIdx.y];
    const u32 thread = blockIdx.x * kThreads + threadIdx.x;  // see store_rows.cu
    const i64 row = thread / u32(kLanes.of_row);
    const int lane = static_cast<int>(thread % u32(kLanes.of_row));
    const int group = lane / kLanes.team;
    const int member = lane % kLanes.team;
    const int rest_at = (lane - kGroups * kLanes.team) * kElems;
    const bool has_rest = rest_at >= 0 && rest_at < kRestBytes;
    wait_for_earlier_kernels<kUsePdl>();

    const bool has_row = row < p.num_rows && row < count_of(p);
    const i64 slot = has_row ? i64(static_cast<const Index<kIndexBytes>*>(p.indices)[row]) : -1;
    const bool inside = slot >= 0 && slot < p.num_slots;
    const i64 offset = inside ? table.strides.template offset_of<true>(slot) : 0;
    const char* source = table.payload + offset + group * table.strides.head_stride;
    const i64 scale_offset =
        kRow.is_given() || !inside ? 0 : table.scale_strides.template offset_of<true>(slot);
    Words<kElems> payload[kLanes.chunks];
    float scale = 0;
    Vec<kElems> rest{};
    if (inside && group < kGroups) {
      scale =
          load_scale(kRow, table.scales + scale_offset + group * table.scale_strides.head_stride);
#pragma unroll
      for (int c = 0; c < kLanes.chunks; ++c) {
        const int place = place_of(c, member);
        if (place < kGroup) payload[c] = Words<kElems>(load_vec<kElems>(source + place));
      }
    }
    if (inside && has_rest) {
      rest = load_vec<kElems>(table.payload + offset + table.rest_offset + rest_at);
    }
    let_next_kernel_start<kUsePdl>();
    if (has_row && group < kGroups) {
      char* target =
          table.values + row * table.values_row_stride + group * table.values_group_stride;
#pragma unroll
      for (int c = 0; c < kLanes.chunks; ++c) {
        const int place = place_of(c, member);
        if (place < kGroup) store_values(target, place, payload[c], scale);
      }
    }
    if (has_row && has_rest) {
      store_vec<kElems>(table.rest + row * table.rest_row_stride + rest_at, rest);
    }
    if (lane == 0 && slot >= p.num_slots) {
      report_fault(p.fault, p.indices_site, row, slot, p.num_slots);
    }
  }

 private:
  static __device__ constexpr int place_of(int chunk, int member) {
    return (chunk * kLanes.team + member) * kElems;
  }

  static __device__ i64 count_of(const Params& p) {
    if (p.count == nullptr) return p.num_rows;
    return p.count_bytes == 4 ? i64(*static_cast<const i32*>(p.count))
                              : *static_cast<const i64*>(p.count);
  }

  static __device__ void store_values(char* target, int place, const Words<kElems>& payload,
                                      float scale) {
    constexpr int kItem = item_bytes_of(kType);
    float values[kElems];
    if constexpr (kRow.is_int8) {
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        values[i] =
            static_cast<float>(static_cast<signed char>(payload.words[i / 4] >> (i % 4 * 8)));
      }
    } else {
      floats_of_e4m3<kElems>(payload, values);
    }
#pragma unroll
    for (int i = 0; i < kElems; ++i) values[i] *= scale;
#pragma unroll
    for (int i = 0; i < kElems; i += kStoreElems) {
      store_vec<kStoreElems * kItem>(target + (place + i) * kItem,
                                     words_of<kType, kStoreElems>(values + i).vec);
    }
  }
};

}  // namespace jitkern
