// The comparisons of fast_compare_key at the exact end of their arrays, in every instruction set
// that this CPU has.
#include "ops/compare_key_simd.h"

#include "sweep.h"

namespace emulate {

// Arrays of n words that differ at `at`, and not at all if that is n.
void one_run(const jitkern::CompareLevel& level, i64 n, i64 at, Random& random) {
  std::vector<i64> values(n);
  for (i64& value : values) value = random.below(1 << 30);
  const IntBuffer a("a", values, 4);
  if (at < n) values[at] ^= i64(1) << random.below(31);
  for (i64 i = at + 1; i < n; ++i) values[i] += random.below(2);
  const IntBuffer b("b", values, 4);
  const i64 found = level.first_difference(static_cast<const u32*>(a.data()),
                                           static_cast<const u32*>(b.data()), n);
  if (found != at) fail("found " + std::to_string(found) + ", expected " + std::to_string(at));
}

}  // namespace emulate

int main() {
  using namespace emulate;
  install_reports();
  Random random(3);
  Tally tally;
  size_t levels = 0;
  for (const jitkern::CompareLevel& level : jitkern::kCompareLevels) {
    if (!level.supported()) continue;
    ++levels;
    for (i64 n = 0; n <= 200; ++n) {
      for (i64 at = 0; at <= n; ++at) {
        now_running = "compare_key " + std::string(level.name) + ": " + std::to_string(n) +
                      " words, difference at " + std::to_string(at);
        one_run(level, n, at, random);
        ++tally.runs;
      }
    }
  }
  report("compare_key", levels, tally);
}
