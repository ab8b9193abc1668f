// The pairs that copy_blocks takes, of two lists of block numbers.
#include <jitkern/types.h>
#include <tvm/ffi/function.h>

#include <vector>

namespace jitkern {

namespace {

// Whether all numbers of one side of the pairs are below `bound`, and no two are the same. Beside
// the work itself, sorting 128 numbers would take as long as all else that a call does.
bool are_distinct(const i64* side, i64 count, i64 bound) {
  static thread_local std::vector<u64> seen;  // a bit for each block; all are 0 between two calls
  const size_t words = static_cast<size_t>(bound) / 64 + 1;
  if (seen.size() < words) seen.resize(words);
  i64 checked = 0;
  for (; checked < count; ++checked) {
    const u64 number = static_cast<u64>(side[2 * checked]);
    if (number >= static_cast<u64>(bound)) break;
    const u64 bit = u64(1) << number % 64;
    if ((seen[number / 64] & bit) != 0) break;
    seen[number / 64] |= bit;
  }
  for (i64 i = 0; i < checked; ++i) seen[static_cast<u64>(side[2 * i]) / 64] = 0;
  return checked == count;
}

// Writes `count` pairs to memory of 16 bytes for each, which is the call's own: what is checked is
// what was copied, whatever other threads make of the numbers. False where one of them is wrong:
// Python then says which.
bool make_block_pairs(int64_t pairs, int64_t sources, int64_t targets, int64_t count,
                      int64_t num_sources, int64_t num_targets) {
  i64* const out = reinterpret_cast<i64*>(pairs);
  for (i64 i = 0; i < count; ++i) {
    out[2 * i] = reinterpret_cast<const i64*>(sources)[i];
    out[2 * i + 1] = reinterpret_cast<const i64*>(targets)[i];
  }
  return are_distinct(out, count, num_sources) && are_distinct(out + 1, count, num_targets);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_block_pairs, make_block_pairs);

}  // namespace

}  // namespace jitkern
