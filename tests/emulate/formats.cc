// The kernels of store_rows and gather_rows in a format, on exact buffers.
//
// The reference are the functions of ops/formats.h, value by value; the tests in Python hold those
// to the descriptions of the formats.
#include "ops/formats.h"

#include "ops/gather_rows.cu"
#include "ops/store_rows.cu"

#include "sweep.h"

namespace emulate {

constexpr FaultSite kIndicesSite{5};

struct FormatKernel {
  int format, groups, group, rest_bytes, type, elems, index_bytes;
  int store_threads;
  void (*store)(const FormatParams&);
  int gather_threads;
  void (*gather)(const FormatParams&);

  std::string name() const {
    std::string name = "formats:";
    for (const int number : {format, groups, group, rest_bytes, type, elems, index_bytes}) {
      name += " " + std::to_string(number);
    }
    return name;
  }
};

template <int... kNumbers>
FormatKernel kernel_of() {
  using Store = StoreRowsKernel<kNumbers..., STORE_ROWS_CONFIG>;
  using Gather = GatherRowsKernel<kNumbers..., GATHER_ROWS_CONFIG>;
  return {kNumbers..., Store::kNumThreads, Store::run, Gather::kNumThreads, Gather::run};
}

std::vector<FormatKernel> kernels() {
  return {
      // format, groups, group, bytes of the rest, type, elements of a vector, bytes of an index
      kernel_of<kFp8DsMla, 4, 128, 128, kBFloat16, 16, 4>(),
      kernel_of<kFp8DsMla, 1, 128, 6, kFloat16, 2, 4>(),
      kernel_of<kInt8PerTokenHead, 3, 5, 0, kFloat32, 1, 4>(),
      kernel_of<kFp8DsV41Paged, 3, 32, 0, kFloat16, 1, 8>(),
      kernel_of<kFp8, 5, 12, 0, kBFloat16, 4, 8>(),
      kernel_of<kFp8PerTokenHead, 1, 513, 0, kFloat16, 1, 4>(),
#ifndef SWEEP_FEW
      kernel_of<kFp8DsMla, 4, 128, 128, kFloat32, 8, 8>(),
      kernel_of<kFp8DsMla, 2, 128, 7, kBFloat16, 1, 8>(),
      kernel_of<kFp8DsMla, 3, 128, 0, kFloat32, 4, 4>(),
      kernel_of<kFp8IndexK, 1, 128, 0, kBFloat16, 16, 8>(),
      kernel_of<kFp8IndexK, 1, 128, 0, kFloat32, 1, 4>(),
      kernel_of<kFp8IndexK, 2, 128, 0, kFloat16, 4, 8>(),
      kernel_of<kFp8DsV41, 16, 32, 0, kBFloat16, 16, 4>(),
      kernel_of<kFp8DsV41, 16, 32, 0, kFloat32, 2, 8>(),
      kernel_of<kFp8DsV41, 1, 32, 0, kFloat16, 1, 4>(),
      kernel_of<kFp8DsV41Paged, 16, 32, 0, kBFloat16, 16, 8>(),
      kernel_of<kFp8DsV41Paged, 5, 32, 0, kFloat32, 8, 4>(),
      kernel_of<kFp8, 8, 128, 0, kBFloat16, 16, 4>(),
      kernel_of<kFp8, 1, 96, 0, kFloat32, 16, 8>(),
      kernel_of<kFp8, 3, 5, 0, kFloat16, 1, 4>(),
      kernel_of<kFp8, 1, 1, 0, kFloat32, 1, 8>(),
      kernel_of<kFp8PerTokenHead, 8, 128, 0, kFloat16, 16, 8>(),
      kernel_of<kFp8PerTokenHead, 2, 6, 0, kBFloat16, 2, 4>(),
      kernel_of<kFp8PerTokenHead, 4, 40, 0, kFloat32, 8, 8>(),
      kernel_of<kInt8PerTokenHead, 2, 600, 0, kBFloat16, 8, 4>(),
      kernel_of<kInt8PerTokenHead, 8, 64, 0, kBFloat16, 16, 8>(),
      kernel_of<kInt8PerTokenHead, 1, 1, 0, kFloat16, 1, 4>(),
#endif
  };
}

// Numbers of all magnitudes, with zeros, infinities and NaN among them.
float any_value(float magnitude, Random& random) {
  const float value = static_cast<float>(random.below(20001) - 10000) * 1e-4f * magnitude;
  const float inf = float_of_bits(0x7f800000);
  switch (random.below(200)) {
    case 0:
      return inf;
    case 1:
      return -inf;
    case 2:
      return float_of_bits(0x7fc00000);
    case 3:
      return -0.0f;
    case 4:
      return float_of_bits(static_cast<u32>(random.bits()) & 0x807fffff);  // subnormal
    default:
      return value;
  }
}
float any_magnitude(Random& random) {
  return random.below(5) == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(random.below(48)) - 32);
}
// A scale that is a positive number, so that no product is a NaN of unknown bits.
float any_scale(Random& random) {
  return std::ldexp(1.0f + static_cast<float>(random.below(1000)) * 1e-3f,
                    static_cast<int>(random.below(40)) - 30);
}

// Calls `use` with a constant of the kernel's type of values.
template <class Use>
void with_type(int type, const Use& use) {
  if (type == kFloat32) use(std::integral_constant<int, kFloat32>());
  if (type == kFloat16) use(std::integral_constant<int, kFloat16>());
  if (type == kBFloat16) use(std::integral_constant<int, kBFloat16>());
}

// A cache, or K and V, the rows that are stored in it or gathered from it, and their scales.
class Tables {
 public:
  Tables(const FormatKernel& kernel, bool is_store, Random& random)
      : kernel_(kernel), format_(row_format(kernel.format)), is_store_(is_store) {
    num_tables_ = kernel.rest_bytes == 0 && random.below(2) == 0 ? 2 : 1;
    choose_rows(random);
    choose_cache(random);
    choose_scales(random);
    fill(random);
  }
  int num_threads() const { return is_store_ ? kernel_.store_threads : kernel_.gather_threads; }
  int num_tables() const { return num_tables_; }
  i64 num_rows() const { return num_rows_; }
  i64 num_slots() const { return layout_.num_slots(); }

  void set(FormatParams& params) {
    params.num_rows = num_rows_;
    params.num_slots = num_slots();
    params.rule = format_.rule;
    if (format_.has_other_rule && rule_is_other_) params.rule.pow2 = !params.rule.pow2;
    rule_ = params.rule;
    for (int t = 0; t < num_tables_; ++t) {
      FormatTable& table = params.tables[t];
      table.values = values_[t]->row(0);
      table.values_row_stride = kernel_.groups * values_[t]->stride_bytes();
      table.values_group_stride = values_[t]->stride_bytes();
      if (kernel_.rest_bytes > 0) {
        table.rest = rest_->row(0);
        table.rest_row_stride = rest_->stride_bytes();
      }
      table.payload = payload_at(t, 0, 0, false);
      table.rest_offset = kernel_.groups * (kernel_.group + format_.scale_bytes);
      table.scales = scale_at(t, 0, 0, false);
      set_strides(table);
    }
  }

  // What the kernel does for row `row` and `slot`; -1: zeros.
  void expect(i64 row, i64 slot) {
    for (int t = 0; t < num_tables_; ++t) {
      for (i64 g = 0; g < kernel_.groups; ++g) {
        with_type(kernel_.type, [&](const auto type) {
          is_store_ ? expect_stored<decltype(type)::value>(t, row, slot, g)
                    : expect_gathered<decltype(type)::value>(t, row, slot, g);
        });
      }
    }
    if (kernel_.rest_bytes == 0) return;
    const i64 at = kernel_.groups * (kernel_.group + format_.scale_bytes);
    if (is_store_) {
      std::memcpy(payload_at(0, slot, 0, true) + at, rest_->row(row), kernel_.rest_bytes);
    } else if (slot < 0) {
      std::memset(rest_->expected(row), 0, kernel_.rest_bytes);
    } else {
      std::memcpy(rest_->expected(row), payload_at(0, slot, 0, false) + at, kernel_.rest_bytes);
    }
  }

  void check() {
    for (int t = 0; t < num_tables_; ++t) values_[t]->check();
    cache_->check();
    if (rest_) rest_->check();
    if (scales_) scales_->check();
  }

 private:
  bool is_in_row() const { return format_.place == ScalePlace::kInRow; }
  bool is_in_page() const { return format_.place == ScalePlace::kInPage; }
  i64 payload_bytes() const { return i64(kernel_.groups) * kernel_.group; }
  i64 scale_bytes() const { return i64(kernel_.groups) * format_.scale_bytes; }

  // Vectors of values, of at most 16 bytes, and of the payload are aligned.
  void choose_rows(Random& random) {
    const FormatLanes lanes(kernel_.groups, kernel_.group, kernel_.rest_bytes, kernel_.elems);
    const i64 full = std::max(1, num_threads() / lanes.of_row);
    num_rows_ = random.pick({i64(1), i64(2), full, full + 1, full * 5 / 2 + 1});
    const int item = item_bytes_of(kernel_.type);
    const int vec_bytes = std::min(16, kernel_.elems * item);
    for (int t = 0; t < num_tables_; ++t) {
      const Placement at = any_placement(i64(kernel_.group) * item, vec_bytes, random);
      values_[t] = std::make_unique<RowBuffer>("values", num_rows_ * kernel_.groups,
                                               i64(kernel_.group) * item, at, random);
    }
    if (kernel_.rest_bytes == 0) return;
    const Placement at = any_placement(kernel_.rest_bytes, kernel_.elems, random);
    rest_ = std::make_unique<RowBuffer>("rest", num_rows_, kernel_.rest_bytes, at, random);
  }

  // A piece of the buffer is a head, a row with its scales, or a page with its scales.
  void choose_cache(Random& random) {
    const bool has_heads = !is_in_row() && !is_in_page();
    const bool is_paged = is_in_page() || random.below(3) != 0;
    layout_ = CacheLayout::any(num_rows_ + random.below(num_rows_ + 2), is_paged,
                               has_heads ? kernel_.groups : 1, num_tables_, random);
    pieces_ = layout_;
    i64 piece_bytes = kernel_.group;
    if (is_in_row()) piece_bytes = payload_bytes() + scale_bytes() + kernel_.rest_bytes;
    if (is_in_page()) {
      piece_bytes = layout_.page * (payload_bytes() + scale_bytes());
      pieces_.page = pieces_.slot_step = 1;
      pieces_.block_step = num_tables_;
      pieces_.cache_step = 1;
    }
    const bool has_fp32 = format_.scale_bytes == 4 && !has_heads;
    const int align = has_fp32 ? std::max(4, kernel_.elems) : kernel_.elems;
    Placement at = any_placement(align, align, random);
    at.stride_bytes += (piece_bytes - 1) / align * align;
    cache_ = std::make_unique<RowBuffer>("cache", pieces_.size(), piece_bytes, at, random);
  }

  void choose_scales(Random& random) {
    if (is_in_row() || is_in_page()) return;
    if (format_.is_given()) {
      has_one_scale_ = random.below(2) == 0;
      const i64 count = num_tables_ * (has_one_scale_ ? 1 : kernel_.groups);
      scales_ =
          std::make_unique<RowBuffer>("scales", count, 4, any_placement(4, 4, random), random);
      return;
    }
    scale_layout_ =
        CacheLayout::any(num_slots(), random.below(2) == 0, kernel_.groups, num_tables_, random);
    scales_ = std::make_unique<RowBuffer>("scales", scale_layout_.size(), 4,
                                          any_placement(4, 4, random), random);
  }

  void fill(Random& random) {
    rule_is_other_ = random.below(2) == 0;
    for (int t = 0; t < num_tables_; ++t) {
      for (i64 i = 0; is_store_ && i < num_rows_ * kernel_.groups; ++i) {
        const float magnitude = any_magnitude(random);
        with_type(kernel_.type, [&](const auto type) {
          constexpr int kType = decltype(type)::value;
          for (int j = 0; j < kernel_.group; ++j) {
            const Bits<kType> bits = bits_as<kType>(any_value(magnitude, random));
            put(values_[t]->row(i), values_[t]->expected(i), j, bits);
          }
        });
      }
      if (is_store_ && !format_.is_given()) continue;
      for (i64 slot = 0; slot < (format_.is_given() ? 1 : num_slots()); ++slot) {
        for (i64 g = 0; g < kernel_.groups; ++g) {
          const float scale = any_scale(random);
          store_scale(format_, scale_at(t, slot, g, false), scale);
          store_scale(format_, scale_at(t, slot, g, true), scale);
        }
      }
    }
  }
  template <class T>
  static void put(char* memory, char* expected, int at, T item) {
    reinterpret_cast<T*>(memory)[at] = item;
    reinterpret_cast<T*>(expected)[at] = item;
  }

  // In memory, or in what is expected of it.
  static char* row_of(RowBuffer& buffer, i64 row, bool is_expected) {
    return is_expected ? buffer.expected(row) : buffer.row(row);
  }
  char* payload_at(int t, i64 slot, i64 group, bool is_expected) {
    if (is_in_page()) {
      const i64 page = pieces_.head(t, slot / layout_.page, 0);
      return row_of(*cache_, page, is_expected) + slot % layout_.page * payload_bytes() +
             group * kernel_.group;
    }
    const i64 head = is_in_row() ? 0 : group;
    return row_of(*cache_, layout_.head(t, slot, head), is_expected) +
           (is_in_row() ? group * kernel_.group : 0);
  }
  char* scale_at(int t, i64 slot, i64 group, bool is_expected) {
    if (is_in_page()) {
      const i64 page = pieces_.head(t, slot / layout_.page, 0);
      return row_of(*cache_, page, is_expected) + layout_.page * payload_bytes() +
             slot % layout_.page * scale_bytes() + group * format_.scale_bytes;
    }
    if (is_in_row()) {
      return payload_at(t, slot, 0, is_expected) + payload_bytes() + group * format_.scale_bytes;
    }
    if (format_.is_given()) {
      return row_of(*scales_, has_one_scale_ ? t : t * kernel_.groups + group, is_expected);
    }
    return row_of(*scales_, scale_layout_.head(t, slot, group), is_expected);
  }

  void set_strides(FormatTable& table) const {
    const i64 step = cache_->stride_bytes();
    table.strides = layout_.strides(step);
    if (is_in_row()) {
      table.strides.head_stride = kernel_.group;
      table.scale_strides = table.strides;
      table.scale_strides.head_stride = format_.scale_bytes;
    } else if (is_in_page()) {
      const i64 block = pieces_.block_step * step;
      const Divisor page = Divisor::of(static_cast<u32>(layout_.page));
      table.strides = {block, payload_bytes(), kernel_.group, page};
      table.scale_strides = {block, scale_bytes(), format_.scale_bytes, page};
    } else if (format_.is_given()) {
      table.scale_strides.head_stride = has_one_scale_ ? 0 : scales_->stride_bytes();
    } else {
      table.scale_strides = scale_layout_.strides(scales_->stride_bytes());
    }
  }

  template <int kType>
  void expect_stored(int t, i64 row, i64 slot, i64 group) {
    const auto* values =
        reinterpret_cast<const Bits<kType>*>(values_[t]->row(row * kernel_.groups + group));
    float scale = load_given_scale(t, group);
    if (!format_.is_given()) {
      float amax = 0;
      for (int i = 0; i < kernel_.group; ++i) {
        amax = larger_magnitude(amax, float_of<kType>(values[i]));
      }
      scale = scale_of(amax, format_.largest(), rule_);
      store_scale(format_, scale_at(t, slot, group, true), scale);
    }
    char* payload = payload_at(t, slot, group, true);
    for (int i = 0; i < kernel_.group; ++i) {
      const float number = float_of<kType>(values[i]);
      const float value = format_.is_given() ? number / scale : number * (1.0f / scale);
      payload[i] =
          static_cast<char>(format_.is_int8 ? int8_bits(value) : bits_as<kFloat8E4M3>(value));
    }
  }
  float load_given_scale(int t, i64 group) {
    return format_.is_given() ? load_scale(format_, scale_at(t, 0, group, false)) : 0.0f;
  }

  template <int kType>
  void expect_gathered(int t, i64 row, i64 slot, i64 group) {
    auto* values =
        reinterpret_cast<Bits<kType>*>(values_[t]->expected(row * kernel_.groups + group));
    for (int i = 0; i < kernel_.group; ++i) {
      if (slot < 0) {
        values[i] = 0;
        continue;
      }
      const float scale = load_scale(format_, scale_at(t, slot, group, false));
      const char payload = payload_at(t, slot, group, false)[i];
      const float value = format_.is_int8
                              ? static_cast<float>(static_cast<signed char>(payload))
                              : float_of<kFloat8E4M3>(static_cast<unsigned char>(payload));
      values[i] = bits_as<kType>(value * scale);
    }
  }

  const FormatKernel& kernel_;
  const RowFormat format_;
  const bool is_store_;
  int num_tables_;
  i64 num_rows_;
  ScaleRule rule_{};
  bool rule_is_other_ = false;
  bool has_one_scale_ = false;
  CacheLayout layout_, pieces_, scale_layout_;
  std::unique_ptr<RowBuffer> values_[2], rest_, cache_, scales_;
};

void one_run(const FormatKernel& kernel, Random& random) {
  const bool is_store = random.below(2) == 0;
  Tables tables(kernel, is_store, random);
  const i64 num_rows = tables.num_rows(), num_slots = tables.num_slots();
  std::vector<i64> slots = random.distinct(num_rows, num_slots);
  spoil(slots, num_slots, kernel.index_bytes, random);
  IntBuffer indices("indices", slots, kernel.index_bytes);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  FormatParams params{};
  tables.set(params);
  params.indices = indices.data();
  params.skip = is_store && random.below(2) == 0 ? indices.at(random.below(num_rows)) : -1;
  params.indices_site = kIndicesSite;
  params.fault = fault.record();
  const i64 counted = random.pick({i64(-1), i64(0), num_rows / 2, num_rows, num_rows + 3});
  const int count_bytes = random.pick({4, 8});
  const IntBuffer count("count", {counted}, count_bytes);
  i64 used = num_rows;
  if (!is_store && random.below(2) == 0) {
    params.count = count.data();
    params.count_bytes = count_bytes;
    used = std::min(used, counted);
  }
  for (i64 row = 0; row < used; ++row) {
    const i64 slot = indices.at(row);
    if (is_store && slot == params.skip) continue;
    if (slot >= num_slots) fault.expect(kIndicesSite, row, slot, num_slots);
    const bool is_inside = slot >= 0 && slot < num_slots;
    if (is_inside || !is_store) tables.expect(row, is_inside ? slot : -1);
  }
  const FormatLanes lanes(kernel.groups, kernel.group, kernel.rest_bytes, kernel.elems);
  const unsigned threads = static_cast<unsigned>(tables.num_threads());
  const dim3 grid{ceil_div(num_rows * lanes.of_row, threads),
                  static_cast<unsigned>(tables.num_tables())};
  const auto run = is_store ? kernel.store : kernel.gather;
  launch_fibers(grid, {threads}, any_order(random), [&] { run(params); });
  check_all(tables, indices, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  int first_seed = 0;
  constexpr int kRuns = 40;
  for (const FormatKernel& kernel : kernels()) {
    rounds(kernel.name(), kRuns, [&](Random& random, int) { one_run(kernel, random); }, first_seed);
    first_seed += kRuns;
  }
}
