// unpack on exact buffers: descriptors of all formats, of pieces of every alignment and many sizes,
// short and long, one and several, within the bounds, at them and past them.
#include "ops/unpack.cu"

#include <limits>

#include "sweep.h"

namespace emulate {

constexpr FaultSite kFirstSite{5};

constexpr Config kConfig{UNPACK_CONFIG};

// Small blocks, and little for a warp of its own, so that there is a rest of what is no megabyte.
template <DescriptorFormat kFormat, int kThreads, int kShort, int kOwn, int kFirst, int kUnit>
void add(Specialisations<UnpackParams>& list) {
  using Kernel =
      Unpack<kFormat, kThreads, kConfig.max_occupancy, kConfig.use_pdl, UNPACK_PIECE_IN_FLIGHT,
             UNPACK_IN_FLIGHT, UNPACK_PARTS_IN_FLIGHT, kShort, kOwn, kFirst, kUnit>;
  list.push_back({kOwn, 16, 8, kFormat, kThreads, Kernel::run});
}
template <DescriptorFormat kFormat>
void add_all(Specialisations<UnpackParams>& list) {
  add<kFormat, 64, 3, 4, 4, 3>(list);
  add<kFormat, 96, 9, 9, 5, 4>(list);
  add<kFormat, 64, UNPACK_SHORT_SEGMENTS, UNPACK_OWN_SEGMENTS, UNPACK_FIRST_SEGMENTS,
      UNPACK_UNIT_SEGMENTS>(list);
}

constexpr i64 kMax = std::numeric_limits<i64>::max();
constexpr i64 kMin = std::numeric_limits<i64>::min();

// Of a destination, given away from the front on, so that no two pieces meet.
struct Room {
  i64 bytes;
  i64 used = 0;
};

Pieces any_pieces(DescriptorFormat format, i64 src_bytes, Room& room, Random& random) {
  const i64 most = random.pick({i64(20), i64(70), i64(300), i64(1200), i64(5000), i64(20'000)});
  const i64 len =
      random.below(6) == 0 ? random.pick({i64(0), i64(16), i64(512)}) : random.below(most);
  Pieces pieces{0, 0, len, 1, 0, 0};
  if (format != kTriples && random.below(2) == 0) {
    pieces.count = random.pick({i64(0), i64(1), i64(2), i64(9), random.below(90)});
    pieces.src_stride = random.pick({i64(0), i64(1), len, len + random.below(40), -len, i64(-3)});
    const i64 gap = random.pick({i64(0), i64(0), i64(1), i64(16), random.below(40)});
    pieces.dst_stride = (len + gap) * random.pick({1, 1, -1});
    // All the same, to one place.
    if (pieces.src_stride == 0 && random.below(2) == 0) pieces.dst_stride = 0;
  }
  const i64 steps = pieces.count - 1;
  const i64 from = len + std::abs(pieces.src_stride) * std::max<i64>(steps, 0);
  const i64 to = len + std::abs(pieces.dst_stride) * std::max<i64>(steps, 0);
  const i64 at = room.used + random.pick({i64(0), i64(0), i64(1), random.below(50)});
  if (from > src_bytes || at + to > room.bytes) return {0, 0, 0, 1, 0, 0};
  pieces.src_off = random.pick({i64(0), src_bytes - from, random.below(src_bytes - from + 1)});
  if (pieces.src_stride < 0) pieces.src_off += from - len;
  pieces.dst_off = at + (pieces.dst_stride < 0 ? to - len : 0);
  if (pieces.count > 0) room.used = at + to;
  return pieces;
}

// One that is as long as the source, nearly, and as the destination allows.
Pieces long_piece(i64 src_bytes, RowBuffer& dst, Room& room, Random& random) {
  const i64 dst_off = static_cast<i64>(0 - reinterpret_cast<u64>(dst.row(0))) & 127;
  i64 len = std::min(src_bytes, room.bytes - dst_off);
  if (len <= 0) return {0, 0, 0, 1, 0, 0};
  const bool at_end = random.below(2) == 0;
  // The last vector then begins a segment and has few bytes, or ends one.
  if (len > 512) {
    const i64 more = random.below(3) == 0 ? 0 : random.below(std::min<i64>(16, len % 512 + 1));
    if (at_end) len = len / 512 * 512 + more;
  }
  room.used = dst_off + len;
  return {at_end ? src_bytes - len : 0, dst_off, len, 1, 0, 0};
}

// One of about as many segments as its own warps copy, `own`: it is more of them than its length
// says where it begins at the end of a line.
Pieces piece_at_border(i64 own, i64 src_bytes, RowBuffer& dst, Room& room, Random& random) {
  i64 at = room.used + random.below(128);
  if (random.below(2) == 0) at += 127 - (reinterpret_cast<u64>(dst.row(0)) + u64(at)) % 128;
  const i64 vectors = own * 32 - random.pick({i64(8), random.below(12), 32 + random.below(3)});
  const i64 len = vectors * 16 + random.pick({i64(0), i64(15), random.below(16)});
  if (len > src_bytes || at + len > room.bytes) return {0, 0, 0, 1, 0, 0};
  room.used = at + len;
  return {random.below(src_bytes - len + 1), at, len, 1, 0, 0};
}

// Makes it wrong, or nearly; may happen to make it right.
void spoil(Pieces& pieces, DescriptorFormat format, i64 src_bytes, i64 dst_bytes, Random& random) {
  i64* const numbers[] = {&pieces.src_off, &pieces.dst_off,    &pieces.len,
                          &pieces.count,   &pieces.src_stride, &pieces.dst_stride};
  const i64 which = random.below(format == kTriples ? 3 : 6);
  i64& number = *numbers[which];
  const i64 end = std::max<i64>(pieces.len, 0);
  switch (random.below(6)) {
    case 0:
      number = random.pick({kMax, kMin, kMax - 1, kMin + 1, kMax / 2, i64(1) << 32, -number});
      break;
    case 1:
      pieces.src_off = random.pick({src_bytes + 1 - end, i64(-1)});
      break;
    case 2:
      pieces.dst_off = random.pick({dst_bytes + 1 - end, i64(-1)});
      break;
    case 3:  // several, whose sums and products are too large
      for (i64* one : numbers) {
        if (random.below(2) == 0)
          *one = random.pick({kMax, kMin, i64(1) << 33, i64(3) << 31, i64(-5)});
      }
      if (format == kTriples) pieces = {pieces.src_off, pieces.dst_off, pieces.len, 1, 0, 0};
      break;
    case 4:  // of which 64 bits hold nothing but zeros
      if (format != kSextuples) break;
      pieces.len = 1 + random.below(99);
      pieces.count = (i64(1) << 33) + 1;
      (random.below(2) == 0 ? pieces.src_stride : pieces.dst_stride) = i64(3) << 31;
      break;
    default:
      number = -1 - random.below(20);
  }
}

// Descriptors as they lie in memory.
std::vector<i64> words_of(const std::vector<Pieces>& list, DescriptorFormat format) {
  std::vector<i64> words;
  for (const Pieces& p : list) {
    for (i64 word : {p.src_off, p.dst_off, p.len}) words.push_back(word);
    if (format == kTriples) continue;
    for (i64 word : {p.count, p.src_stride, p.dst_stride}) words.push_back(word);
  }
  return words;
}

void one_run(const Specialisation<UnpackParams>& kernel, int, Random& random) {
  const auto format = static_cast<DescriptorFormat>(kernel.variant);
  // 0: some are wrong; 1: few have anything to do, of them one or two for long, in different
  // chunks; 2: the first is long, and begins or ends where the source does, at a line of the
  // destination; 3: some are about as long as what has no rest.
  const i64 kind = random.pick({0, 0, 0, 1, 1, 2, 2, 3, 4});
  const bool sparse = kind == 1, at_border = kind == 3;
  const unsigned copiers = random.pick({1u, 2u, 5u});
  const unsigned dealers = random.pick({0u, 1u, 2u, 5u});  // none where all is copied anyway
  const i64 num = sparse      ? 400
                  : at_border ? random.pick({1, 2, 5})
                              : random.pick({i64(1), i64(2), i64(5), i64(40), i64(300)});
  const i64 num_warps = copiers * kernel.num_threads / 32;
  const i64 own = num_warps / std::min(num, num_warps) * kernel.row_bytes;
  i64 src_bytes = 1 + (sparse ? 30'000 : random.below(random.pick({100, 3000, 60'000})));
  const bool on_lines = kind == 2 && random.below(2) == 0;
  if (on_lines) src_bytes = ceil_div(src_bytes, 512) * i64(512);
  i64 dst_bytes = 1 + (sparse ? 60'000 : random.below(random.pick({100, 3000, 90'000})));
  if (at_border) src_bytes = own * 512 + 999, dst_bytes = 2 * src_bytes;
  const i64 src_at = on_lines ? 0 : random.pick({i64(0), random.below(128)});
  RowBuffer src("src", 1, src_bytes, src_bytes, src_at, random);
  RowBuffer dst("dst", 1, dst_bytes, dst_bytes, random.pick({i64(0), random.below(128)}), random);

  const i64 long_one = 290 + random.below(100);
  const i64 one_in = random.pick({1, 3, 9});  // is wrong
  Room room{dst_bytes};
  std::vector<Pieces> list;
  if (kind == 2) list.push_back(long_piece(src_bytes, dst, room, random));
  for (i64 i = kind == 2; i < num; ++i) {
    if (sparse && (i == long_one || (i == 7 && random.below(2) == 0))) {
      list.push_back({random.below(99), room.used, 9000 + random.below(9000), 1, 0, 0});
      room.used += list.back().len;
    } else if (sparse && random.below(99) != 0) {
      list.push_back({0, 0, 0, 1, 0, 0});
    } else if (at_border && random.below(3) != 0) {
      list.push_back(piece_at_border(own, src_bytes, dst, room, random));
    } else {
      Room here{sparse ? room.used + 900 : room.bytes, room.used};
      list.push_back(any_pieces(format, src_bytes, here, random));
      room.used = here.used;
    }
    if (kind != 0 || random.below(one_in) != 0) continue;
    spoil(list.back(), format, src_bytes, dst_bytes, random);
    // What happens to be right may lie over others.
    if (verdict_on(list.back(), src_bytes, dst_bytes).part == kNumParts) {
      list.back().len = 0;
    }
  }
  if (!sparse) std::swap(list.front(), list[random.below(num)]);
  const int count_bytes = random.pick({0, 0, 4, 8});
  const i64 wide = count_bytes == 8 ? i64(1) << 32 : num;  // whose half is nothing
  const i64 count = random.pick({i64(-3), i64(0), num / 2, num, num + 5, wide});
  const IntBuffer counted("count", {count}, count_bytes == 4 ? 4 : 8);
  const i64 last = count_bytes == 0 ? num : std::min(std::max<i64>(count, 0), num);

  FaultWord fault(random.pick({0u, 0u, 0u, 0u, 1u, 2u}));
  for (i64 i = 0; i < last; ++i) {
    const Pieces& pieces = list[i];
    // What that says of any numbers is in tests/ops/test_unpack.py.
    const Verdict wrong = verdict_on(pieces, src_bytes, dst_bytes);
    if (wrong.part != kNumParts) {
      fault.expect(FaultSite(u32(kFirstSite) + u32(wrong.part)), i, wrong.value, wrong.bound);
      continue;
    }
    if (pieces.len == 0) continue;
    for (i64 k = 0; k < pieces.count; ++k) {
      std::memcpy(dst.expected(0) + pieces.dst_off + k * pieces.dst_stride,
                  src.row(0) + pieces.src_off + k * pieces.src_stride, pieces.len);
    }
  }
  IntBuffer rows("descriptors", words_of(list, format), 8);
  UnpackParams params{};
  params.dst = dst.row(0);
  params.src = src.row(0);
  params.dst_bytes = dst_bytes;
  params.src_bytes = src_bytes;
  params.descriptors = rows.data();
  params.count = count_bytes == 0 ? nullptr : counted.data();
  params.count_bytes = count_bytes;
  params.num_descriptors = static_cast<u32>(num);
  params.num_copiers = copiers;
  params.reads_host = random.below(3) == 0;
  for (u32 part = 0; part < kNumParts; ++part) {
    params.sites[part] = FaultSite(u32(kFirstSite) + part);
  }
  params.fault = fault.record();
  run_kernel(kernel, {copiers + dealers}, static_cast<unsigned>(kernel.num_threads), random,
             params);
  check_all(dst, src, rows, fault);
}

}  // namespace emulate

int main() {
  using namespace emulate;
  Specialisations<UnpackParams> list;
#ifdef SWEEP_FEW
  add<kSextuples, 64, 4, 4, 4, 3>(list);
#else
  add_all<kTriples>(list);
  add_all<kSextuples>(list);
#endif
  const int runs = list.size() == 1 ? 400 : 150;
  return sweep("unpack", list, [=](const Specialisation<UnpackParams>&) { return runs; }, one_run);
}
