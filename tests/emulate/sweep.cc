#include "sweep.h"

#include <limits>

namespace emulate {

Placement any_placement(i64 row_bytes, int vec_bytes, Random& random) {
  const i64 pads[] = {0, 0, vec_bytes, 2 * vec_bytes, 3 * vec_bytes, 16, 48, 128, row_bytes};
  const i64 pad = pads[random.below(std::size(pads))];
  return {random.below(128 / vec_bytes) * vec_bytes, row_bytes + pad};
}

void spoil(std::vector<i64>& values, i64 bound, int index_bytes, Random& random) {
  const i64 lowest =
      index_bytes == 4 ? std::numeric_limits<i32>::min() : std::numeric_limits<i64>::min();
  const i64 highest = -(lowest + 1);
  const auto padding = [&] { return random.pick({i64(-1), i64(-2), lowest}); };
  const auto too_large = [&] { return random.pick({bound, bound, bound + 1, highest}); };
  const i64 kind = random.below(6);
  for (i64& value : values) {
    const i64 dice = random.below(3);
    if (kind == 1 && dice == 0) value = padding();
    if (kind == 2 && dice == 0) value = too_large();
    if (kind == 3 && dice != 0) value = dice == 1 ? padding() : too_large();
    if (kind == 4) value = padding();
  }
  if (kind == 5) values[random.below(static_cast<i64>(values.size()))] = too_large();
}

std::vector<i64> any_pairs(i64 count, i64 src_rows, i64 dst_rows, int index_bytes, Random& random) {
  std::vector<i64> sources(count);
  for (i64& source : sources) source = random.below(src_rows);
  std::vector<i64> targets = random.distinct(count, dst_rows);
  if (random.below(2) == 0) spoil(sources, src_rows, index_bytes, random);
  if (random.below(2) == 0) spoil(targets, dst_rows, index_bytes, random);
  std::vector<i64> flat;
  for (i64 i = 0; i < count; ++i) flat.insert(flat.end(), {sources[i], targets[i]});
  return flat;
}

i64 any_num_rows(const GroupShape& shape, i64 threads_per_block, Random& random) {
  const i64 full = std::max(i64(1), threads_per_block / (shape.lanes * shape.splits) * shape.rows);
  return random.pick({i64(1), i64(2), full, full - (full > 1), full + 1, full * 5 / 2 + 1});
}

Order any_order(Random& random) {
  return random.pick({Order::kForward, Order::kReverse, Order::kShuffled});
}

}  // namespace emulate
