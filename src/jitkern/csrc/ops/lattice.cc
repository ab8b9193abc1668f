#include "lattice.h"

#include <algorithm>
#include <vector>

namespace jitkern {

namespace {

// A number of strides between `low` and `high`.
struct Steps {
  i64 stride;
  i64 low;
  i64 high;
};

i64 floor_div(i64 a, i64 b) { return a / b - (a % b < 0); }

// Whether a sum of steps, the longest strides first, lies between `begin` and `end`, both excluded.
bool reaches(const Steps* steps, const Steps* last, i64 begin, i64 end) {
  if (steps == last) return begin < 0 && 0 < end;
  i64 rest_low = 0, rest_high = 0;
  for (const Steps* rest = steps + 1; rest != last; ++rest) {
    rest_low += rest->low * rest->stride;
    rest_high += rest->high * rest->stride;
  }
  const auto& [stride, low, high] = *steps;
  const i64 most = std::min(high, floor_div(end - 1 - rest_low, stride));
  for (i64 n = std::max(low, floor_div(begin - rest_high, stride) + 1); n <= most; ++n) {
    if (reaches(steps + 1, last, begin - n * stride, end - n * stride)) return true;
  }
  return false;
}

}  // namespace

Lattice::Lattice(u64 begin, i64 row_bytes, const std::array<Dim, 3>& sizes)
    : begin(begin), end(begin + static_cast<u64>(row_bytes)), row_bytes(row_bytes), dims(sizes) {
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  for (const Dim& dim : dims) end += static_cast<u64>((dim.count - 1) * dim.stride);
}

bool Lattice::has_overlap() const {
  // Nearly always each stride is as long as all rows of the shorter strides together.
  i64 bytes = row_bytes;
  bool is_nested = true;
  for (int d = 2; d >= 0; --d) {
    if (dims[d].count <= 1) continue;
    if (dims[d].stride == 0) return true;
    is_nested &= dims[d].stride >= bytes;
    bytes += (dims[d].count - 1) * dims[d].stride;
  }
  // Else two rows differ by one step or more in dimension d, and by any number in the next ones.
  for (int d = 0; !is_nested && d < 3; ++d) {
    std::vector<Steps> steps;
    for (int e = d; e < 3; ++e) {
      const i64 most = dims[e].count - 1;
      if (most > 0) steps.push_back({dims[e].stride, e == d ? 1 : -most, most});
    }
    if (dims[d].count > 1 &&
        reaches(steps.data(), steps.data() + steps.size(), -row_bytes, row_bytes)) {
      return true;
    }
  }
  return false;
}

bool Lattice::overlaps(const Lattice& other) const {
  if (begin >= other.end || other.begin >= end) return false;
  std::vector<Steps> steps;  // from a row of `other` to a row of this
  const auto add = [&steps](i64 stride, i64 low, i64 high) {
    if (stride == 0 || low == high) return;
    for (Steps& known : steps) {
      if (known.stride != stride) continue;
      known.low += low;
      known.high += high;
      return;
    }
    steps.push_back({stride, low, high});
  };
  for (const Dim& dim : dims) add(dim.stride, 0, dim.count - 1);
  for (const Dim& dim : other.dims) add(dim.stride, 1 - dim.count, 0);
  std::sort(steps.begin(), steps.end(),
            [](const Steps& a, const Steps& b) { return a.stride > b.stride; });
  const i64 distance = static_cast<i64>(begin - other.begin);
  return reaches(steps.data(), steps.data() + steps.size(), -row_bytes - distance,
                 other.row_bytes - distance);
}

}  // namespace jitkern
