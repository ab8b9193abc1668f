// The kernels of store_rows and gather_rows in a format, on exact buffers: how lanes share a row,
// tails of groups and of the rest, pages, strides, counts and faults.
//
// The reference is the code for CPU tensors, ops/formats_cpu.h, on copies of the buffers; the tests
// in Python hold it to the descriptions of the formats.
#include "ops/formats_cpu.h"

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

  FormatShape shape() const { return {groups, group, rest_bytes, type}; }
  int item_bytes() const { return item_bytes_of(type); }
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
      kernel_of<kFp8IndexK, 1, 128, 0, kBFloat16, 16, 8>(),
      kernel_of<kFp8IndexK, 2, 128, 0, kFloat32, 4, 4>(),
      kernel_of<kFp8DsV41, 16, 32, 0, kBFloat16, 16, 4>(),
      kernel_of<kFp8DsV41Paged, 5, 32, 0, kFloat32, 8, 4>(),
      kernel_of<kFp8, 8, 128, 0, kFloat16, 16, 4>(),
      kernel_of<kFp8, 1, 96, 0, kFloat32, 16, 8>(),
      kernel_of<kFp8PerTokenHead, 2, 6, 0, kBFloat16, 2, 8>(),
      kernel_of<kInt8PerTokenHead, 2, 600, 0, kBFloat16, 8, 4>(),
      kernel_of<kInt8PerTokenHead, 1, 1, 0, kFloat16, 1, 8>(),
#endif
  };
}

// Numbers of one magnitude, with infinities, NaN, -0 and subnormal numbers among them.
float any_value(float magnitude, Random& random) {
  const u32 special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x80000000, 1};
  const i64 dice = random.below(200);
  if (dice < 5) return float_of_bits(special[dice]);
  return static_cast<float>(random.below(20001) - 10000) * 1e-4f * magnitude;
}
float any_magnitude(Random& random) {
  return std::ldexp(1.0f, static_cast<int>(random.below(48)) - 32);
}

// Where a buffer has what is expected at an address in it.
char* expected_at(RowBuffer& buffer, const char* address) {
  return buffer.expected(0) + (address - buffer.row(0));
}

// A cache, or K and V, the rows that are stored in it or gathered from it, and their scales.
class Tables {
 public:
  Tables(const FormatKernel& kernel, bool is_store, i64 num_rows, Random& random)
      : kernel_(kernel), is_store_(is_store) {
    num_tables_ = kernel.rest_bytes == 0 && random.below(2) == 0 ? 2 : 1;
    place_rows(num_rows, random);
    place_cache(num_rows + random.below(num_rows + 2), random);
    if (!is_in_cache_) place_scales(random);
    if (is_store) fill_values(num_rows, random);
    if (!is_store || format_.is_given()) fill_scales(random);
    params.num_rows = num_rows;
    params.rule = format_.rule;
    if (format_.has_other_rule && random.below(2) == 0) params.rule.pow2 = !params.rule.pow2;
  }
  int num_tables() const { return num_tables_; }

  // What the kernel does for row `row` and `slot`; -1: zeros.
  void expect(i64 row, i64 slot) {
    for (int t = 0; t < num_tables_; ++t) {
      FormatTable table = params.tables[t];
      table.values = expected_at(*values_[t], table.values);
      table.payload = expected_at(*cache_, table.payload);
      table.scales = expected_at(scale_buffer(), table.scales);
      if (rest_) table.rest = expected_at(*rest_, table.rest);
      if (is_store_) store_row(table, format_, params.rule, kernel_.shape(), row, slot);
      if (!is_store_) gather_row(table, format_, kernel_.shape(), row, slot);
    }
  }

  void check() {
    for (const auto& buffer : {&values_[0], &values_[1], &rest_, &cache_, &scales_}) {
      if (*buffer) (*buffer)->check();
    }
  }

  FormatParams params{};

 private:
  using Buffer = std::unique_ptr<RowBuffer>;

  // Vectors of values, of at most 16 bytes, and of the payload are aligned.
  void place_rows(i64 num_rows, Random& random) {
    const i64 bytes = i64(kernel_.group) * kernel_.item_bytes();
    for (int t = 0; t < num_tables_; ++t) {
      const int vec_bytes = std::min(16, kernel_.elems * kernel_.item_bytes());
      const Placement at = any_placement(bytes, vec_bytes, random);
      values_[t] = Buffer(new RowBuffer("values", num_rows * kernel_.groups, bytes, at, random));
      params.tables[t].values = values_[t]->row(0);
      params.tables[t].values_row_stride = kernel_.groups * at.stride_bytes;
      params.tables[t].values_group_stride = at.stride_bytes;
    }
    if (kernel_.rest_bytes == 0) return;
    const Placement at = any_placement(kernel_.rest_bytes, kernel_.elems, random);
    rest_ = Buffer(new RowBuffer("rest", num_rows, kernel_.rest_bytes, at, random));
    params.tables[0].rest = rest_->row(0);
    params.tables[0].rest_row_stride = at.stride_bytes;
  }

  // A piece of the buffer is a head, a row with its scales, or a page with its scales.
  void place_cache(i64 least_slots, Random& random) {
    const bool is_page = format_.place == ScalePlace::kInPage;
    CacheLayout layout = CacheLayout::any(least_slots, is_page || random.below(3) != 0,
                                          is_in_cache_ ? 1 : kernel_.groups, num_tables_, random);
    const i64 page = layout.page;
    const i64 payload = i64(kernel_.groups) * kernel_.group;
    const i64 scales = i64(kernel_.groups) * format_.scale_bytes;
    i64 piece = is_in_cache_ ? payload + scales + kernel_.rest_bytes : kernel_.group;
    params.num_slots = layout.num_slots();
    if (is_page) {
      piece *= page;
      layout.page = layout.slot_step = layout.cache_step = 1;
      layout.block_step = num_tables_;
    }
    const int align = is_in_cache_ ? std::max(format_.scale_bytes, kernel_.elems) : kernel_.elems;
    Placement at = any_placement(align, align, random);
    at.stride_bytes += (piece - 1) / align * align;
    cache_ = Buffer(new RowBuffer("cache", layout.size(), piece, at, random));
    for (int t = 0; t < num_tables_; ++t) {
      FormatTable& table = params.tables[t];
      table.payload = cache_->row(layout.head(t, 0, 0));
      table.strides = layout.strides(at.stride_bytes);
      if (is_page) table.strides.page = Divisor::of(static_cast<u32>(page));
      if (is_in_cache_) table.strides.head_stride = kernel_.group;
      table.scales = table.payload + payload * (is_page ? page : 1);
      table.scale_strides = table.strides;
      table.scale_strides.head_stride = format_.scale_bytes;
      if (is_page) {
        table.strides.slot_stride = payload;
        table.scale_strides.slot_stride = scales;
      }
      table.rest_offset = payload + scales;
    }
  }

  // In a tensor of their own. Of given scales there may be one for all groups.
  void place_scales(Random& random) {
    const bool is_given = format_.is_given();
    const bool is_one = is_given && random.below(2) == 0;
    const CacheLayout layout =
        CacheLayout::any(is_given ? 1 : params.num_slots, !is_given && random.below(2) == 0,
                         is_one ? 1 : kernel_.groups, num_tables_, random);
    const Placement at = any_placement(4, 4, random);
    scales_ = Buffer(new RowBuffer("scales", layout.size(), 4, at, random));
    for (int t = 0; t < num_tables_; ++t) {
      params.tables[t].scales = scales_->row(layout.head(t, 0, 0));
      params.tables[t].scale_strides = layout.strides(at.stride_bytes);
      if (is_one) params.tables[t].scale_strides.head_stride = 0;
    }
  }

  void fill_values(i64 num_rows, Random& random) {
    for (int t = 0; t < num_tables_; ++t) {
      for (i64 i = 0; i < num_rows * kernel_.groups; ++i) {
        const float magnitude = random.below(5) == 0 ? 0.0f : any_magnitude(random);
        with_float_type(kernel_.type, [&](const auto type) {
          auto* const values = reinterpret_cast<Bits<type.value>*>(values_[t]->row(i));
          for (int j = 0; j < kernel_.group; ++j) {
            values[j] = bits_as<type.value>(any_value(magnitude, random));
          }
        });
        std::memcpy(values_[t]->expected(i), values_[t]->row(i), values_[t]->row_bytes());
      }
    }
  }

  // Positive numbers, so that no product is a NaN of unknown bits.
  void fill_scales(Random& random) {
    for (int t = 0; t < num_tables_; ++t) {
      for (i64 slot = 0; slot < (format_.is_given() ? 1 : params.num_slots); ++slot) {
        for (i64 g = 0; g < kernel_.groups; ++g) {
          char* at = scale_address(params.tables[t], format_, slot, g);
          store_scale(format_, at, any_magnitude(random) * 1.37f);
          std::memcpy(expected_at(scale_buffer(), at), at, format_.scale_bytes);
        }
      }
    }
  }

  RowBuffer& scale_buffer() { return scales_ ? *scales_ : *cache_; }

  const FormatKernel& kernel_;
  const bool is_store_;
  const RowFormat format_ = row_format(kernel_.format);
  const bool is_in_cache_ =
      format_.place == ScalePlace::kInRow || format_.place == ScalePlace::kInPage;
  int num_tables_;
  Buffer values_[2], rest_, cache_, scales_;
};

void one_run(const FormatKernel& kernel, Random& random) {
  const bool is_store = random.below(2) == 0;
  const int num_threads = is_store ? kernel.store_threads : kernel.gather_threads;
  const FormatLanes lanes(kernel.groups, kernel.group, kernel.rest_bytes, kernel.elems);
  const i64 full = std::max(1, num_threads / lanes.of_row);
  const i64 num_rows = random.pick({i64(1), i64(2), full, full + 1, full * 5 / 2 + 1});
  Tables tables(kernel, is_store, num_rows, random);
  FormatParams& params = tables.params;
  std::vector<i64> slots = random.distinct(num_rows, params.num_slots);
  spoil(slots, params.num_slots, kernel.index_bytes, random);
  IntBuffer indices("indices", slots, kernel.index_bytes);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
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
    if (slot >= params.num_slots) fault.expect(kIndicesSite, row, slot, params.num_slots);
    const bool is_inside = slot >= 0 && slot < params.num_slots;
    if (is_inside || !is_store) tables.expect(row, is_inside ? slot : -1);
  }
  const dim3 grid{ceil_div(num_rows * lanes.of_row, num_threads),
                  static_cast<unsigned>(tables.num_tables())};
  const auto run = is_store ? kernel.store : kernel.gather;
  launch_fibers(grid, {static_cast<unsigned>(num_threads)}, any_order(random),
                [&] { run(params); });
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
