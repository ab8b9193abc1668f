// What a push asks for, copied by all warps that have come for it.
#pragma once

#include "unpack.cuh"

namespace jitkern {

// Each descriptor is copied by warps of its own, as unpack does; one that is too long for these by
// all, behind the others.
template <u32 kPieceInFlight, u32 kInFlight, u32 kPartsInFlight, u32 kOwnSegments>
struct RingCopy {
  // What the warps of one of so many descriptors copy of it.
  static __device__ u64 own_segments(u32 count, u32 warps) {
    return count == 0 || count >= warps ? kOwnSegments : u64(warps / count) * kOwnSegments;
  }
  static __device__ bool is_long(const uint4& sizes, u32 count, u32 warps) {
    return is_longer(i64(sizes.x), i64(sizes.y), own_segments(count, warps));
  }

  // By whatever number of warps.
  static __device__ bool may_be_long(const uint4& sizes) {
    return is_longer(i64(sizes.x), i64(sizes.y), kOwnSegments);
  }

  // By each warp, number `warp` of `warps`. `vectors` are four of each descriptor; the fourth one
  // begins with what faults call it.
  static __device__ void copy(const UnpackParams& p, const uint4* vectors, u32 count, bool has_long,
                              u32 warp, u32 warps) {
    const Team team(count, warp, warps);
    for (u32 i = team.descriptor; i < count; i += team.of) {
      const uint4* const here = vectors + 4 * u64(i);
      if (has_long && is_long(here[1], count, warps)) continue;
      copy_one(p, here, team.warp, team.warps);
    }
    if (!has_long) return;
    for (u32 begin = 0; begin < count; begin += 32) {
      const u32 i = begin + threadIdx.x % 32;
      u32 found = __ballot_sync(
          kAllLanes, i < count && is_long(vectors[4 * u64(i < count ? i : 0) + 1], count, warps));
      for (; found != 0; found &= found - 1) {
        copy_one(p, vectors + 4 * u64(begin + __ffs(static_cast<int>(found)) - 1), warp, warps);
      }
    }
  }

 private:
  static __device__ void copy_one(const UnpackParams& p, const uint4* vectors, u32 warp,
                                  u32 warps) {
    const Pieces pieces = pieces_of_vectors(vectors);
    if (is_short(p, pieces, u64(warps) * kOwnSegments)) {
      return copy_piece<kPieceInFlight>(p, pieces, warp, warps);
    }
    const i64 position = joined(vectors[3].x, vectors[3].y);
    const Work work = checked_work(p, pieces, position, warp == 0 && threadIdx.x % 32 == 0);
    copy_share<kInFlight, kPartsInFlight>(p, work, work.num_segments(), warp, warps);
  }
};

}  // namespace jitkern
