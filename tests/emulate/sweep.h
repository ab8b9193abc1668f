// What the sweeps over the ops' kernels have in common: which specialisations are compiled, how
// many times each one runs, and what indices they are given.
//
//   -DSWEEP_ROWS=1024,65536   these row sizes
//   -DRACE                    another thread writes the indices: see Rewriter
#pragma once

#include <jitkern/types.h>

#include <utility>

#include "buffers.h"
#include "ops/cache_strides.h"

namespace emulate {

// How kernels are launched, as the ops' Python says.
struct Config {
  int num_threads, max_occupancy;
  bool use_pdl;
};
#ifdef PAIRS_SMALL_CONFIG  // in drivers, not in what they are linked with
constexpr Config kSmallConfig{PAIRS_SMALL_CONFIG}, kLargeConfig{PAIRS_LARGE_CONFIG};
constexpr Config kListConfig{PAIRS_LIST_CONFIG}, kScanConfig{PAIRS_SCAN_CONFIG};
#endif

#ifdef RACE
constexpr bool kHasRace = true;
#else
constexpr bool kHasRace = false;
#endif

// One compiled kernel. The sweeps themselves are no templates, so that thousands of specialisations
// compile in the time that their `run` takes.
template <class Params>
struct Specialisation {
  i64 row_bytes;
  int vec_bytes;
  int index_bytes;
  int variant;  // what else the op is specialised on
  int num_threads;
  void (*run)(const Params&);
};

template <class Params>
using Specialisations = std::vector<Specialisation<Params>>;

constexpr int widest_vec(i64 row_bytes) {
  const i64 all = row_bytes | 16;
  return static_cast<int>(all & -all);
}

// Row sizes whose every specialisation is run.
constexpr bool sweeps_all(i64 row_bytes) {
  return row_bytes <= 24 || row_bytes % 164 == 0 || row_bytes >= 1024;
}

// Index types take turns where not all specialisations are run.
constexpr int index_bytes_in_turn(i64 row_bytes) {
  return (row_bytes / widest_vec(row_bytes) / 2 + row_bytes) % 2 ? 4 : 8;
}

// The widest vector is run for every row size; narrower ones are for bases and strides that are
// less aligned than the row.
constexpr bool sweeps(i64 row_bytes, int vec_bytes) {
  return row_bytes % vec_bytes == 0 &&
         (vec_bytes == widest_vec(row_bytes) || sweeps_all(row_bytes));
}

// kernels<row_bytes, vec_bytes>(list) appends the kernels of one row size and vector width.
#define EMULATE_COLLECT(Params, kernels)                                  \
  template <i64 kRowBytes, int... kVecs>                                  \
  void collect_widths(Specialisations<Params>& list) {                    \
    (                                                                     \
        [&list] {                                                         \
          if constexpr (sweeps(kRowBytes, kVecs)) {                       \
            kernels<kRowBytes, kVecs>(list);                              \
          }                                                               \
        }(),                                                              \
        ...);                                                             \
  }                                                                       \
  template <i64... kRows>                                                 \
  Specialisations<Params> collect(std::integer_sequence<i64, kRows...>) { \
    Specialisations<Params> list;                                         \
    (collect_widths<kRows, 1, 2, 4, 8, 16>(list), ...);                   \
    return list;                                                          \
  }

#ifdef SWEEP_ROWS
using SweepRows = std::integer_sequence<i64, SWEEP_ROWS>;
#endif

// Any that the vector width allows.
Placement any_placement(i64 row_bytes, int vec_bytes, Random& random);

// On the host's side of a line-aligned call every row begins on a line of 128 bytes.
inline Placement on_lines(Placement at) { return {0, (at.stride_bytes + 127) / 128 * 128}; }

// A variant of a kernel for pages whose rows lie in heads of so many bytes.
constexpr int kPages = 1 << 20;

// Heads of which two or more make a row: the fewest, and heads of one vector. 0: there are none.
constexpr i64 longest_head(i64 row_bytes, int vec_bytes) {
  for (i64 heads = 2; heads <= row_bytes / vec_bytes; ++heads) {
    if (row_bytes / vec_bytes % heads == 0) return row_bytes / heads;
  }
  return 0;
}

// Where the slots of caches that share a buffer lie, counted in heads: as in [blocks, page, heads],
// [caches, blocks, heads, page], or another order of these dimensions. Equally spaced slots are a
// block of one page.
struct CacheLayout {
  i64 num_blocks = 1;
  i64 page;
  i64 num_heads = 1;
  i64 num_caches = 1;
  i64 block_step = 0, slot_step = 0, head_step = 0, cache_step = 0;

  // At least `num_slots` slots, exactly so many unless they are in pages.
  static CacheLayout any(i64 num_slots, bool is_paged, i64 num_heads, i64 num_caches,
                         Random& random);
  i64 num_slots() const { return num_blocks * page; }
  // All heads of all caches.
  i64 size() const { return num_slots() * num_heads * num_caches; }
  i64 head(int cache, i64 slot, i64 head) const {
    return cache * cache_step + slot / page * block_step + slot % page * slot_step +
           head * head_step;
  }
  CacheStrides strides(i64 step_bytes) const {
    return {block_step * step_bytes, slot_step * step_bytes, head_step * step_bytes,
            Divisor::of(static_cast<u32>(page))};
  }
};

// Index values below `bound`, some of them replaced by negative ones and ones that are out of
// range, the extremes of the index type among them.
void spoil(std::vector<i64>& values, i64 bound, int index_bytes, Random& random);

// Pairs of (source, target), flat, of distinct targets; now and then some of them are spoiled.
std::vector<i64> any_pairs(i64 count, i64 src_rows, i64 dst_rows, int index_bytes, Random& random,
                           bool repeats = true);

// How many rows fill a block, miss it by one, or spread over several; few where rows are long.
i64 any_num_rows(const GroupShape& shape, i64 threads_per_block, Random& random);

// Compares each with what is expected of it.
template <class... Buffers>
void check_all(Buffers&... buffers) {
  (buffers.check(), ...);
}

inline unsigned ceil_div(i64 a, i64 b) { return static_cast<unsigned>((a + b - 1) / b); }

Order any_order(Random& random);

// Runs `one(random, number)` with the numbers from 0 to `count` as seeds.
template <class One>
void rounds(const std::string& name, int count, const One& one, int first_seed = 0) {
  install_reports();
  has_race = kHasRace;
  for (int number = 0; number < count; ++number) {
    now_running = name + ", round " + std::to_string(number);
    Random random(static_cast<u64>(first_seed + number));
    for (int i = 0; i < 4; ++i) random.bits();
    one(random, number);
  }
}

template <class Params>
void run_kernel(const Specialisation<Params>& kernel, dim3 grid, unsigned num_threads,
                Random& random, const Params& params) {
  launch_fibers(grid, {num_threads}, any_order(random), [&] { kernel.run(params); });
}

// Once for each place that the primary buffer can have relative to a line of 128 bytes; a sample of
// those where rows are long or the vectors are narrow.
template <class Params>
i64 offset_of_run(const Specialisation<Params>& kernel, int run) {
  return 5 * run * kernel.vec_bytes % 128;
}
template <class Params>
int runs_at_every_offset(const Specialisation<Params>& kernel) {
  if (kernel.row_bytes >= 1024) return 16;
  return std::max(16, (kernel.row_bytes <= 24 ? 128 : 32) / kernel.vec_bytes);
}

// Runs `one(kernel, run, random)` for each specialisation `runs(kernel)` times.
template <class Params, class Runs, class One>
int sweep(const char* op, const Specialisations<Params>& list, Runs runs, One one) {
  install_reports();
  has_race = kHasRace;
  if (list.empty()) fail("no kernels");
  for (const auto& kernel : list) {
    const int count = runs(kernel);
    for (int run = 0; run < count; ++run) {
      now_running = std::string(op) + ": rows of " + std::to_string(kernel.row_bytes) +
                    " bytes, vectors of " + std::to_string(kernel.vec_bytes) + ", indices of " +
                    std::to_string(kernel.index_bytes) + ", variant " +
                    std::to_string(kernel.variant) + ", run " + std::to_string(run);
      Random random(static_cast<u64>(
          ((kernel.row_bytes * 32 + kernel.vec_bytes) * 16 + kernel.index_bytes + kernel.variant) *
              1024 +
          run));
      for (int i = 0; i < 4; ++i) random.bits();
      one(kernel, run, random);
    }
  }
  return 0;
}

}  // namespace emulate
