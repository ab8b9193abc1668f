// unpack on the threads of the CPU.
#include <algorithm>

#include "host/cpu_copy.h"
#include "unpack_host.h"

namespace jitkern {

namespace {

constexpr i64 kPartBytes = 64 << 10;

// How a descriptor is cut into parts: several pieces of it each, or one piece is several.
struct Parts {
  i64 of_piece;
  i64 pieces;

  explicit Parts(const Pieces& p)
      : of_piece(ceil_div(p.len, kPartBytes)), pieces(std::max<i64>(1, kPartBytes / p.len)) {}

  i64 count(const Pieces& p) const {
    return of_piece > 1 ? p.count * of_piece : ceil_div(p.count, pieces);
  }
};

void copy_part(const UnpackSides& sides, const Pieces& p, i64 part, CopyRow copy) {
  const Parts parts(p);
  const i64 first = part / parts.of_piece * parts.pieces;
  const i64 at = part % parts.of_piece * kPartBytes;
  const i64 bytes = std::min(p.len - at, kPartBytes);
  for (i64 i = first; i < std::min(p.count, first + parts.pieces); ++i) {
    copy(sides.dst.data + p.dst_off + i * p.dst_stride + at,
         sides.src.data + p.src_off + i * p.src_stride + at, bytes);
  }
}

}  // namespace

void unpack_by_cpu(const UnpackSides& sides, const std::vector<Pieces>& list) {
  std::vector<i64> starts;  // the number of each descriptor's first part
  starts.reserve(list.size());
  i64 num_parts = 0, bytes = 0;
  for (const Pieces& pieces : list) {
    starts.push_back(num_parts);
    num_parts += Parts(pieces).count(pieces);
    bytes += pieces.len * pieces.count;
  }
  const i64 threads = threads_for(num_parts, 2 * bytes);
  const bool stream = bytes >= threads * kStreamThreadBytes;
  const CopyRow copy = stream ? stream_row : plain_row;
  const auto copy_parts = [&](i64 begin, i64 end) {
    size_t i = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (i64 part = begin; part < end; ++part) {
      while (i + 1 < starts.size() && starts[i + 1] <= part) ++i;
      copy_part(sides, list[i], part - starts[i], copy);
    }
    if (stream) end_stream();
  };
  if (threads > 1) return for_parts(num_parts, threads, copy_parts);
  copy_parts(0, num_parts);
}

}  // namespace jitkern
