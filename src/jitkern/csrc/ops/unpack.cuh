// unpack on the device: how pieces are cut into vectors, and how a warp copies them.
//
// A vector is 16 aligned bytes of the destination. A lane loads the one or two aligned lines of 16
// bytes of the source that hold them and shifts the bytes, so stores are the same for any
// alignment. A segment is 32 vectors, one for each lane; it may hold several short pieces.
//
// No byte outside of `src` is read, as memory checkers would complain: a line that sticks out of
// the tensor is read byte by byte.
#pragma once

#include <jitkern/copy.cuh>

#include "unpack.h"

namespace jitkern {

constexpr u32 kAllLanes = 0xffffffffu;
constexpr u64 kSegmentBytes = 32 * 16;
constexpr u64 kMostShortBytes = 1 << 30;  // see is_short

__device__ inline i64 joined(u32 low, u32 high) { return static_cast<i64>(u64(high) << 32 | low); }

// A Descriptor as four vectors. The last is its second seal.
__device__ inline Pieces pieces_of_vectors(const uint4* vectors) {
  const uint4 offsets = vectors[0], sizes = vectors[1], strides = vectors[2];
  return {joined(offsets.x, offsets.y), joined(offsets.z, offsets.w), i64(sizes.x), i64(sizes.y),
          joined(strides.x, strides.y), joined(strides.z, strides.w)};
}

// A descriptor's pieces as segments. Partial segments may hold bytes of no piece. Whole segments
// lie inside a single piece, and are copied faster.
struct Work {
  u64 dst;  // addresses of the first piece
  u64 src;
  i64 dst_stride;
  i64 src_stride;
  i64 len;
  u32 count;
  u32 slots_each;  // slots for vectors per piece
  u32 num_parts;   // partial segments
  u32 num_whole;
  bool has_head;  // the first segment is partial, the whole ones follow
  bool at_edge;   // some lines stick out of the source: see is_inside

  __device__ u32 num_segments() const { return num_parts + num_whole; }
  // Bytes from the first slot of a piece to its target. Long pieces start at a 128-byte line.
  __device__ u64 lead(u64 target) const { return target & (num_whole > 0 ? 127 : 15); }
};

__device__ inline u32 segments_of(u64 slots) { return static_cast<u32>((slots + 31) / 32); }

// Whether the lines of 16 bytes that hold these bytes lie in the source.
__device__ inline bool is_inside(const UnpackParams& p, u64 begin, u64 end) {
  const u64 src = reinterpret_cast<u64>(p.src);
  return (begin & ~15ull) >= src && ((end + 15) & ~15ull) <= src + static_cast<u64>(p.src_bytes);
}

// The segments of a valid descriptor.
__device__ inline Work work_of(const UnpackParams& p, Pieces pieces) {
  Work work{};
  pieces = simplified(pieces);
  if (pieces.empty()) return work;
  const u64 len = static_cast<u64>(pieces.len);
  work.dst = reinterpret_cast<u64>(p.dst) + static_cast<u64>(pieces.dst_off);
  work.src = reinterpret_cast<u64>(p.src) + static_cast<u64>(pieces.src_off);
  work.dst_stride = pieces.dst_stride;
  work.src_stride = pieces.src_stride;
  work.len = pieces.len;
  work.count = static_cast<u32>(pieces.count);
  const Reach from = reach_of(pieces.src_off, pieces.len, pieces.count, pieces.src_stride);
  work.at_edge = !is_inside(p, reinterpret_cast<u64>(p.src) + static_cast<u64>(from.begin),
                            reinterpret_cast<u64>(p.src) + static_cast<u64>(from.end));
  if (pieces.count == 1) {
    const u64 lead = work.dst & 127;
    // The line of the first vector may stick out of the source. So may the last line, which the
    // last two vectors may share: if these lie in two segments, the second one is not whole.
    const u64 begin = lead != 0 || work.at_edge;
    const u64 end = (lead + len) / kSegmentBytes - work.at_edge;
    if (static_cast<i64>(end) > static_cast<i64>(begin)) {
      work.num_whole = static_cast<u32>(end - begin);
      work.num_parts = segments_of((lead + len + 15) / 16) - work.num_whole;
      work.has_head = begin != 0;
      return work;
    }
  }
  const bool same_lead = pieces.count == 1 || pieces.dst_stride % 16 == 0;
  work.slots_each = static_cast<u32>(((same_lead ? work.dst & 15 : 15) + len + 15) / 16);
  work.num_parts = segments_of(u64(work.count) * work.slots_each);
  return work;
}

// The segments of any descriptor: none if it is out of range, which one thread reports.
__device__ inline Work checked_work(const UnpackParams& p, const Pieces& pieces, i64 position,
                                    bool reports) {
  const Verdict verdict = verdict_on(pieces, p.src_bytes, p.dst_bytes);
  if (verdict.part == kNumParts) return work_of(p, pieces);
  if (reports) {
    report_fault(p.fault, p.sites[verdict.part], position, verdict.value, verdict.bound);
  }
  return {};
}

// Whether a descriptor may have more than `segments`, by a quick upper bound.
__device__ inline bool is_longer(i64 len, i64 count, u64 segments) {
  if (len <= 0 || count <= 0) return false;
  return product(static_cast<u64>(count), (static_cast<u64>(len) >> 4) + 9) > segments * 32;
}

// The warps that share a descriptor. This is warp `number` of `total`; neighbouring warps are in
// different teams.
struct Team {
  u32 num_teams;
  u32 descriptor;  // this team's first, the next ones are num_teams apart; -1: the warp has no team
  u32 warp;        // the number of this warp in its team
  u32 warps;       // the warps of the team

  __device__ Team(u32 num_descriptors, u32 number, u32 total) {
    num_teams = num_descriptors < total ? num_descriptors : total;
    warps = num_teams == 0 ? 1 : total / num_teams;
    warp = num_teams == 0 ? 0 : number / num_teams;
    descriptor = warp < warps ? number - warp * num_teams : ~0u;
  }
};

// A lane's vector. Its bytes [begin, end) belong to a piece; byte 0 comes from `source`.
struct Place {
  u64 target;
  u64 source;
  u32 begin;
  u32 end;

  __device__ bool empty() const { return begin >= end; }
};

// This lane's vector of a partial segment.
__device__ inline Place place_of(const Work& work, u32 number) {
  const u32 segment = number + (number >= u32(work.has_head) ? work.num_whole : 0);
  const u32 lane = threadIdx.x % 32;
  const u32 piece = work.count == 1 ? 0 : (segment * 32 + lane) / work.slots_each;
  if (piece >= work.count) return {0, 0, 0, 0};
  const u64 slot = u64(segment) * 32 + lane - u64(piece) * work.slots_each;
  const u64 first = work.dst + piece * static_cast<u64>(work.dst_stride);
  // The offset of the vector in the piece; negative if it starts before the piece.
  const u64 at = slot * 16 - work.lead(first);
  const i64 left = work.len - static_cast<i64>(at);
  return {first + at, work.src + piece * static_cast<u64>(work.src_stride) + at,
          static_cast<u32>(static_cast<i64>(at) < 0 ? 0 - at : 0),
          left < 16 ? static_cast<u32>(left < 0 ? 0 : left) : 16};
}

// 16 of the 32 bytes of two lines, from byte `shift` on.
__device__ inline uint4 shifted(const uint4& low, const uint4& high, u32 shift) {
  const bool by_two = shift & 8;
  const u32 a = by_two ? low.z : low.x, b = by_two ? low.w : low.y;
  const u32 c = by_two ? high.x : low.z, d = by_two ? high.y : low.w;
  const u32 e = by_two ? high.z : high.x, f = by_two ? high.w : high.y;
  const bool by_one = shift & 4;
  const u32 v = by_one ? b : a, w = by_one ? c : b, x = by_one ? d : c, y = by_one ? e : d;
  const u32 z = by_one ? f : e;
  const u32 bits = shift % 4 * 8;
  return {__funnelshift_r(v, w, bits), __funnelshift_r(w, x, bits), __funnelshift_r(x, y, bits),
          __funnelshift_r(y, z, bits)};
}

__device__ inline void store_part(char* target, const uint4& value, u32 begin, u32 end) {
  const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    if (begin <= 4 * w && 4 * w + 4 <= end) {
      *reinterpret_cast<u32*>(target + 4 * w) = words[w];
    } else if (begin < 4 * w + 4 && 4 * w < end) {
#pragma unroll
      for (u32 i = 4 * w; i < 4 * w + 4; ++i) {
        if (begin <= i && i < end) target[i] = static_cast<char>(words[w] >> (8 * (i % 4)));
      }
    }
  }
}

// The value of the next lane; lane 31 gets that of lane 0.
__device__ inline uint4 of_next_lane(const uint4& value) {
  const int next = static_cast<int>((threadIdx.x + 1) % 32);
  return {__shfl_sync(kAllLanes, value.x, next), __shfl_sync(kAllLanes, value.y, next),
          __shfl_sync(kAllLanes, value.z, next), __shfl_sync(kAllLanes, value.w, next)};
}

// Copies `count` whole segments, 1 to kInFlight, from `number` on. A lane loads one line of each
// and gets the other from the next lane; the last lane gets it from the next segment, or loads one
// more line. All loads come before the first store.
template <u32 kInFlight>
__device__ inline void copy_whole(const Work& work, u32 number, u32 count) {
  const u32 lane = threadIdx.x % 32;
  const u64 at = u64(number + work.has_head) * kSegmentBytes + 16 * lane - work.lead(work.dst);
  const u32 shift = static_cast<u32>(work.src + at) & 15;
  const char* const lines = reinterpret_cast<const char*>(work.src + at - shift);
  char* const target = reinterpret_cast<char*>(work.dst + at);
  uint4 line[kInFlight];
#pragma unroll
  for (u32 i = 0; i < kInFlight; ++i) {
    if (i < count) line[i] = load_vec<16>(lines + i * kSegmentBytes);
  }
  if (shift == 0) {
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i) {
      if (i < count) store_vec<16>(target + i * kSegmentBytes, line[i]);
    }
    return;
  }
  uint4 next{};  // the last lane's line of the next segment
  if (lane == 0) next = load_vec<16>(lines + count * kSegmentBytes);
#pragma unroll
  for (u32 i = kInFlight; i-- > 0;) {
    // A copy: a conditional reference would keep the whole array in local memory.
    uint4 high = line[i];
    if (lane == 0) high = next;
    high = of_next_lane(high);
    if (i < count) {
      store_vec<16>(target + i * kSegmentBytes, shifted(line[i], high, shift));
      next = line[i];
    }
  }
}

__device__ inline bool sticks_out(const UnpackParams& p, const Place& place) {
  return !is_inside(p, place.source + place.begin, place.source + place.end);
}

// Copies the vectors at the two ends of the source, which copy_parts leaves out.
__device__ inline void copy_edges(const UnpackParams& p, const Work& work, u32 number, u32 end) {
#pragma unroll 1
  for (; number < end; ++number) {
    const Place place = place_of(work, number);
    if (place.empty() || !sticks_out(p, place)) continue;
    const char* source = reinterpret_cast<const char*>(place.source);
    char* const target = reinterpret_cast<char*>(place.target);
#pragma unroll 1
    for (u32 i = place.begin; i < place.end; ++i) target[i] = source[i];
  }
}

// Copies partial segments [begin, end), kVecs at most. Each lane loads both of its lines.
template <u32 kVecs>
__device__ inline void copy_parts(const UnpackParams& p, const Work& work, u32 begin, u32 end) {
  uint4 low[kVecs], high[kVecs];
  char* target[kVecs];
  u32 range[kVecs];  // begin, end and shift
#pragma unroll
  for (u32 i = 0; i < kVecs; ++i) {
    const Place place = place_of(work, begin + i);
    const bool skipped =
        begin + i >= end || place.empty() || (work.at_edge && sticks_out(p, place));
    const u32 shift = static_cast<u32>(place.source & 15);
    const char* line = reinterpret_cast<const char*>(place.source - shift);
    // Only lines that hold a byte of the piece.
    if (!skipped && place.begin < 16 - shift) low[i] = load_vec<16>(line);
    if (!skipped && place.end > 16 - shift) high[i] = load_vec<16>(line + 16);
    target[i] = reinterpret_cast<char*>(place.target);
    range[i] = skipped ? 0 : place.begin | place.end << 8 | shift << 16;
  }
#pragma unroll
  for (u32 i = 0; i < kVecs; ++i) {
    const uint4 value = shifted(low[i], high[i], range[i] >> 16);
    if ((range[i] & 0xffff) == 16 << 8) {
      store_vec<16>(target[i], value);
    } else if (range[i] != 0) {
      store_part(target[i], value, range[i] & 0xff, range[i] >> 8 & 0xff);
    }
  }
  if (work.at_edge) copy_edges(p, work, begin, end);
}

// Whether copy_piece may copy a descriptor: a valid single piece of at most `segments`, whose lines
// lie in the source. Not from host memory, as copy_piece may read a line twice.
__device__ inline bool is_short(const UnpackParams& p, const Pieces& pieces, u64 segments) {
  const u64 len = static_cast<u64>(pieces.len);
  const u64 src = reinterpret_cast<u64>(p.src) + static_cast<u64>(pieces.src_off);
  return pieces.count == 1 && len < kMostShortBytes &&
         len + kSegmentBytes <= segments * kSegmentBytes && pieces.src_off >= 0 &&
         pieces.src_off <= p.src_bytes - pieces.len && pieces.dst_off >= 0 &&
         pieces.dst_off <= p.dst_bytes - pieces.len && is_inside(p, src, src + len) &&
         !p.reads_host;
}

// Copies a short piece, which `warps` warps share. It needs no divisions and look-ups, which take
// most time of a small call.
template <u32 kVecs>
__device__ inline void copy_piece(const UnpackParams& p, const Pieces& pieces, u32 warp,
                                  u32 warps) {
  const u64 dst = reinterpret_cast<u64>(p.dst) + static_cast<u64>(pieces.dst_off);
  const u64 src = reinterpret_cast<u64>(p.src) + static_cast<u64>(pieces.src_off);
  const u32 len = static_cast<u32>(pieces.len);
  const u32 lead = static_cast<u32>(dst) & (len < 2 * kSegmentBytes ? 15 : 127);
  const u32 end = lead + len;
  const u32 shift = static_cast<u32>(src - lead) & 15;
  char* const target = reinterpret_cast<char*>(dst - lead);
  const char* const lines = reinterpret_cast<const char*>(src - lead - shift);
  const u32 step = warps * static_cast<u32>(kSegmentBytes);
  for (u32 at = (warp * 32 + threadIdx.x % 32) * 16; at < end; at += kVecs * step) {
    uint4 low[kVecs], high[kVecs];
    u32 begins[kVecs], ends[kVecs];
#pragma unroll
    for (u32 i = 0; i < kVecs; ++i) {
      const u32 place = at + i * step;
      begins[i] = place < lead ? lead - place : 0;
      ends[i] = place + 16 <= end ? 16 : place < end ? end - place : 0;
      if (begins[i] >= ends[i]) continue;
      // Only lines that hold a byte of the piece.
      if (begins[i] < 16 - shift) low[i] = load_vec<16>(lines + place);
      if (ends[i] > 16 - shift) high[i] = load_vec<16>(lines + place + 16);
    }
#pragma unroll
    for (u32 i = 0; i < kVecs; ++i) {
      if (begins[i] >= ends[i]) continue;
      const uint4 value = shifted(low[i], high[i], shift);
      char* const place = target + at + i * step;
      if (begins[i] == 0 && ends[i] == 16) {
        store_vec<16>(place, value);
      } else {
        store_part(place, value, begins[i], ends[i]);
      }
    }
  }
}

// Copies segments [begin, end) of a descriptor.
template <u32 kInFlight, u32 kPartsInFlight>
__device__ inline void copy_segments(const UnpackParams& p, const Work& work, u32 begin, u32 end) {
  u32 at = begin;
  while (at < work.num_parts && at < end) {
    const u32 parts = end < work.num_parts ? end : work.num_parts;
    const u32 next = parts - at < kPartsInFlight ? parts : at + kPartsInFlight;
    copy_parts<kPartsInFlight>(p, work, at, next);
    at = next;
  }
  for (; at < end; at += kInFlight) {
    copy_whole<kInFlight>(work, at - work.num_parts, end - at < kInFlight ? end - at : kInFlight);
  }
}

// Copies a warp's share of the first `own` segments. Few segments are spread over all `warps`. If
// there are many, each warp takes as many at a time as fit in flight.
template <u32 kInFlight, u32 kPartsInFlight>
__device__ inline void copy_share(const UnpackParams& p, const Work& work, u32 own, u32 warp,
                                  u32 warps) {
  const u32 share = (own + warps - 1) / warps;
  const u32 batch = share < kInFlight ? share : kInFlight;
  for (u64 at = u64(warp) * batch; at < own; at += u64(warps) * batch) {
    const u32 begin = static_cast<u32>(at);
    copy_segments<kInFlight, kPartsInFlight>(p, work, begin,
                                             own - begin < batch ? own : begin + batch);
  }
}

}  // namespace jitkern
