// store_rows on the device, in a format: values are scaled group by group, rounded to 8 bits and
// written to slot indices[i] of the cache, with their scales and the rest of the row.
#include <jitkern/pdl.cuh>

#include "floats.cuh"
#include "formats.h"

namespace jitkern {

template <int kFormat, int kGroups, int kGroup, int kRestBytes, int kType, int kElems,
          int kIndexBytes, int kThreads, int kMaxOccupancy, bool kUsePdl>
struct StoreRowsKernel {
  using Params = FormatParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;

  static constexpr RowFormat kRow = row_format(kFormat);
  static constexpr FormatLanes kLanes = FormatLanes(kGroups, kGroup, kRestBytes, kElems);
  static __device__ void run(const Params& p) {
    const FormatTable& table = p.tables[blockIdx.y];
    // 32 bits, which formats.cc sees to: a division of 64 bits takes as long as the rest.
    const u32 thread = blockIdx.x * kThreads + threadIdx.x;
    const i64 row = thread / u32(kLanes.of_row);
    const int lane = static_cast<int>(thread % u32(kLanes.of_row));
    const int group = lane / kLanes.team;
    const int member = lane % kLanes.team;
    const bool has_row = row < p.num_rows;
    const bool has_values = has_row && group < kGroups;
    const int rest_at = (lane - kGroups * kLanes.team) * kElems;
    const bool has_rest = has_row && rest_at >= 0 && rest_at < kRestBytes;
    wait_for_earlier_kernels<kUsePdl>();

    const i64 slot = has_row ? i64(static_cast<const Index<kIndexBytes>*>(p.indices)[row]) : -1;
    LoadWords loaded[kLanes.chunks][kLoads];
    Vec<kElems> rest{};
    if (has_values) {
      const char* source =
          table.values + row * table.values_row_stride + group * table.values_group_stride;
#pragma unroll
      for (int c = 0; c < kLanes.chunks; ++c) {
        const int place = place_of(c, member);
        if (!kIsFull && place >= kGroup) continue;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const char* address = source + (place + i * kLoadElems) * kItem;
          loaded[c][i] = LoadWords(load_vec<kLoadElems * kItem>(address));
        }
      }
    } else if (has_rest) {
      rest = load_vec<kElems>(table.rest + row * table.rest_row_stride + rest_at);
    }
    let_next_kernel_start<kUsePdl>();

    float values[kLanes.chunks][kElems];
#pragma unroll
    for (int c = 0; c < kLanes.chunks; ++c) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        floats_of<kType, kLoadElems>(loaded[c][i], values[c] + i * kLoadElems);
      }
    }
    float scale = 1;
    if constexpr (!kRow.is_given()) {
      scale = scale_of(amax_of_team(values), kRow.largest(), p.rule);
    } else if (has_values) {
      scale = load_scale(kRow, table.scales + group * table.scale_strides.head_stride);
    }
    if (slot >= p.num_slots && slot != p.skip && lane == 0) {
      report_fault(p.fault, p.indices_site, row, slot, p.num_slots);
    }
    if (slot < 0 || slot >= p.num_slots || slot == p.skip) return;
    char* target = table.payload + table.strides.template offset_of<true>(slot);
    if (has_rest) store_vec<kElems>(target + table.rest_offset + rest_at, rest);
    if (!has_values) return;
    const ScaleDivisor divisor(scale);
#pragma unroll
    for (int c = 0; c < kLanes.chunks; ++c) {
      const int place = place_of(c, member);
      if (!kIsFull && place >= kGroup) continue;
      store_vec<kElems>(target + group * table.strides.head_stride + place,
                        payload_of(values[c], divisor).vec);
    }
    if (kRow.is_given() || member != 0) return;
    char* const scales = table.scales + table.scale_strides.template offset_of<true>(slot);
    store_scale(kRow, scales + group * table.scale_strides.head_stride, scale);
  }

 private:
  static constexpr int kItem = item_bytes_of(kType);
  // A lane loads its values by vectors of at most 16 bytes.
  static constexpr int kLoadElems = kElems * kItem > 16 ? 16 / kItem : kElems;
  static constexpr int kLoads = kElems / kLoadElems;
  using LoadWords = Words<kLoadElems * kItem>;
  // Whether the vectors of a team have no values beyond the group.
  static constexpr bool kIsFull = kLanes.team * kLanes.chunks * kElems == kGroup;

  // The place in the group of the first value of a lane's chunk.
  static __device__ constexpr int place_of(int chunk, int member) {
    return (chunk * kLanes.team + member) * kElems;
  }

  static __device__ float amax_of_team(const float (&values)[kLanes.chunks][kElems]) {
    float amax = 0;
#pragma unroll
    for (int c = 0; c < kLanes.chunks; ++c) {
#pragma unroll
      for (int i = 0; i < kElems; ++i) amax = larger_magnitude(amax, values[c][i]);
    }
#pragma unroll
    for (int distance = kLanes.team / 2; distance > 0; distance /= 2) {
      amax = larger(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    }
    return amax;
  }

  // Given scales divide, as in vLLM; the others multiply by the inverse.
  static __device__ void scale_values(const float* values, const ScaleDivisor& divisor,
                                      float* scaled) {
#ifdef __CUDA_ARCH__
    if (kRow.is_given() && divisor.is_fast) {
#pragma unroll
      for (int i = 0; i < kElems; ++i) scaled[i] = divisor.fast_quotient(values[i]);
      return;
    }
#endif
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      scaled[i] = kRow.is_given() ? values[i] / divisor.scale : values[i] * divisor.inverse;
    }
  }

  static __device__ Words<kElems> payload_of(const float* values, const ScaleDivisor& divisor) {
    float scaled[kElems];
    scale_values(values, divisor, scaled);
    if constexpr (!kRow.is_int8) {
      return words_of<kFloat8E4M3, kElems>(scaled);
    } else {
      Words<kElems> words;
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        words.words[i / 4] |= u32(int8_bits(scaled[i])) << (i % 4 * 8);
      }
      return words;
    }
  }
};

}  // namespace jitkern
