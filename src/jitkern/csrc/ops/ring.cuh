// Reads a push of a DescriptorRing, by all threads of one block, and copies its descriptors'
// pieces. Host memory is a round trip of 1.2 us away, and several reads of one line are served one
// after the other, each in 1.06 us. So one block reads each line once. It reads the word and the
// first descriptors together, which seals make safe (both/ring.h).
#pragma once

#include "system_memory.cuh"
#include "unpack.cuh"
#include "unpack_ring.h"

namespace jitkern {

// A slot and its generation.
struct Turn {
  u64 generation;
  u32 slot;

  __device__ Turn next(u32 num_slots) const {
    return slot + 1 == num_slots ? Turn{generation + 1, 0} : Turn{generation, slot + 1};
  }
};

__device__ inline Turn turn_of(const RingParams& p) {
  return {load_fresh(&p.state->generations) + 1, load_fresh(&p.state->slot)};
}
__device__ inline void set_turn(const RingParams& p, const Turn& turn) {
  p.state->generations = turn.generation - 1;
  p.state->slot = turn.slot;
}

// The next owner of the ring sees everything that this call did.
__device__ inline void release_ring(const RingParams& p) {
  __threadfence();
  atomicExch(&p.state->owner, u64(0));
}

// Makes this call the owner of the ring, and returns 0; or returns the other owner. If a call of
// another stream ended after `begin` was read, `begin` is old and the ring counts as owned.
__device__ inline u64 take_ring(const RingParams& p, const Turn& begin) {
  const u64 owner = claim(&p.state->owner, p.call);
  if (owner != 0) return owner;
  const Turn now = turn_of(p);
  if (now.generation == begin.generation && now.slot == begin.slot) return 0;
  release_ring(p);
  return p.call;
}

// Marks the push as complete, after the last copy.
__device__ inline void complete_push(const RingParams& p, const Turn& turn) {
  char* const done = p.dones + turn.slot * p.ring.done_bytes;
  store_release(reinterpret_cast<u64*>(done), turn.generation);
}

template <u32 kThreads, class Copy>
class RingReader {
 public:
  static constexpr u32 kAtOnce = kThreads / 4;  // descriptors that are read with the word

  // `word` is in shared memory.
  __device__ RingReader(const RingParams& p, u64& word) : p_(p), word_(word) {}

  // Reads a slot's word, with its first descriptors if `whole`; 0 if it is invalid. Meanwhile one
  // thread calls `alongside`; all threads then see what it wrote to shared memory.
  template <class Alongside>
  __device__ u64 look(u32 number, bool whole, const Alongside& alongside) {
    const char* slot = p_.base + p_.ring.slots_at + number * p_.ring.slot_bytes;
    vectors_ = reinterpret_cast<const uint4*>(slot + kRingLineBytes);
    has_first_ = whole;
    __syncthreads();  // all threads have read the word of the push before
    if (whole && threadIdx.x / 4 < p_.ring.max_descriptors)
      first_ = load_fresh(&vectors_[threadIdx.x]);
    if (threadIdx.x == 0) word_ = load_acquire(reinterpret_cast<const u64*>(slot));
    if (threadIdx.x == 32) alongside();
    __syncthreads();
    const u64 word = word_;
    return ring_count(word) <= p_.ring.max_descriptors ? word : 0;
  }

  // Reads descriptors [begin, end) of the push into `to`, four vectors each. The last vector has
  // the descriptor's position for faults. Sets `has_long` if this thread read a descriptor
  // that Copy may call long. Returns false if a seal differs from the word: the descriptors belong
  // to another push.
  __device__ bool read(u64 word, Turn turn, u32 begin, u32 end, void* to, bool& has_long) {
    const u32 first = 4 * begin;
    const auto take = [&](u32 number, uint4 vector) {
      if (number % 4 == 1) has_long |= Copy::may_be_long(vector);
      if (number % 4 == 3) {
        vector.x = number / 4;
        vector.y = turn.slot;
      }
      static_cast<uint4*>(to)[number - first] = vector;
    };
    if (begin == 0 && has_first_) {
      const u32 vectors = 4 * (end < kAtOnce ? end : kAtOnce);
      bool old = threadIdx.x < vectors && !is_sealed(threadIdx.x, first_, word);
      if (__syncthreads_or(old)) {
        // They were read before the push was complete: read them again.
        if (threadIdx.x < vectors) first_ = load_fresh(&vectors_[threadIdx.x]);
        old = threadIdx.x < vectors && !is_sealed(threadIdx.x, first_, word);
        if (__syncthreads_or(old)) return false;
      }
      if (threadIdx.x < vectors) take(threadIdx.x, first_);
      begin = kAtOnce;
    }
    bool wrong = false;
#pragma unroll 4
    for (u32 i = 4 * begin + threadIdx.x; i < 4 * end; i += kThreads) {
      const uint4 vector = load_fresh(&vectors_[i]);
      wrong |= !is_sealed(i, vector, word);
      take(i, vector);
    }
    return !__syncthreads_or(wrong);
  }

 private:
  // Every second vector of a descriptor ends with a seal.
  static __device__ bool is_sealed(u32 number, const uint4& vector, u64 word) {
    return number % 2 == 0 || (u64(vector.w) << 32 | vector.z) == word;
  }

  const RingParams& p_;
  u64& word_;
  const uint4* vectors_ = nullptr;
  uint4 first_{};
  bool has_first_ = false;
};

// Each descriptor is copied by its own warps, as in unpack; then all warps copy the long ones.
template <u32 kPieceInFlight, u32 kInFlight, u32 kPartsInFlight, u32 kOwnSegments>
struct RingCopy {
  // The most segments of a descriptor that its own warps copy.
  static __device__ u64 own_segments(u32 count, u32 warps) {
    return count == 0 || count >= warps ? kOwnSegments : u64(warps / count) * kOwnSegments;
  }
  static __device__ bool is_long(const uint4& sizes, u32 count, u32 warps) {
    return is_longer(i64(sizes.x), i64(sizes.y), own_segments(count, warps));
  }

  // Whether a descriptor is long for some number of warps.
  static __device__ bool may_be_long(const uint4& sizes) {
    return is_longer(i64(sizes.x), i64(sizes.y), kOwnSegments);
  }

  // Every warp calls it. `vectors` has four vectors per descriptor; the last one begins with the
  // descriptor's position for faults.
  static __device__ void copy(const UnpackParams& p, const uint4* vectors, u32 count, bool has_long,
                              u32 warp, u32 warps) {
    const Team team(count, warp, warps);
    for (u32 i = team.descriptor; i < count; i += team.num_teams) {
      const uint4* const here = vectors + 4 * u64(i);
      if (has_long && is_long(here[1], count, warps)) continue;
      copy_one(p, here, team.warp, team.warps);
    }
    if (!has_long) return;
    for (u32 begin = 0; begin < count; begin += 32) {
      const u32 i = begin + threadIdx.x % 32;
      u32 lanes = __ballot_sync(
          kAllLanes, i < count && is_long(vectors[4 * u64(i < count ? i : 0) + 1], count, warps));
      for (; lanes != 0; lanes &= lanes - 1) {
        copy_one(p, vectors + 4 * u64(begin + __ffs(static_cast<int>(lanes)) - 1), warp, warps);
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
