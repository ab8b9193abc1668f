// Which indices the rows of a table belong to: all of them, one range, or two.
#pragma once

#include <algorithm>
#include <limits>

#include "sweep.h"

namespace emulate {

constexpr i64 kMaxIndex = std::numeric_limits<i64>::max();

struct Vocabulary {
  i64 start = 0;
  i64 length = 0;
  i64 added_start = 0;
  i64 added_length = 0;
  i64 added_row = 0;
  i64 last_index = kMaxIndex;
  i64 bound = 0;  // a few indices behind the last that is a row

  // What the kernels ask in one comparison without a sign.
  i64 row_of(i64 index) const {
    if (index < 0) return -1;
    if (index >= start && index - start < length) return index - start;
    if (index >= added_start && index - added_start < added_length) {
      return added_row + (index - added_start);
    }
    return -1;
  }
};

inline Vocabulary any_vocabulary(i64 table_rows, Random& random) {
  Vocabulary v;
  if (random.below(3) == 0) {  // the whole table
    v.length = v.bound = table_rows;
    v.last_index = table_rows - 1;
    return v;
  }
  v.length = random.below(table_rows + 1);
  v.added_row = v.length;
  if (random.below(3) != 0) v.added_length = random.below(table_rows - v.length + 1);
  // Either may be in front of the other, with a gap or without.
  const bool swapped = random.below(2) == 0;
  const i64 first = random.below(30);
  const i64 second = first + (swapped ? v.added_length : v.length) + random.pick({0, 1, 5});
  v.start = swapped ? second : first;
  v.added_start = swapped ? first : second;
  const i64 end = std::max(v.start + v.length, v.added_start + v.added_length);
  if (random.below(2) == 0) v.last_index = end + random.below(4) - 1;
  v.bound = end + 3;
  return v;
}

// Indices in and around the ranges.
inline std::vector<i64> any_indices(const Vocabulary& v, i64 count, int index_bytes,
                                    Random& random) {
  std::vector<i64> values(count);
  const i64 below = std::max<i64>(std::min(v.bound - 1, v.last_index) + 1, 1);
  for (i64& value : values) value = random.below(below);
  spoil(values, v.last_index < kMaxIndex ? v.last_index + 1 : v.bound, index_bytes, random);
  return values;
}

}  // namespace emulate
