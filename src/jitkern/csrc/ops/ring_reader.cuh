// Reading a push of a DescriptorRing, by all threads of one block. Host memory is a round trip of
// 1.2 us away, and reads of one line of it by several blocks, or by several instructions, are
// served one after the other, each of 1.06 us: so one block reads each line once, and the word
// comes in one trip with the first descriptors, which its seals allow (both/ring.h).
#pragma once

#include "system_memory.cuh"
#include "unpack_ring.h"

namespace jitkern {

// A slot and a generation of it.
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

// What the call has done is seen by the one that takes the ring next.
__device__ inline void release_ring(const RingParams& p) {
  __threadfence();
  atomicExch(&p.state->owner, u64(0));
}

// Makes a call the one that consumes; returns who is, where there is another. A call of another
// stream may end at any moment: if it did since `begin` and `consumed` were read they are old, and
// that call, though it has gone, counts as being there.
__device__ inline u64 take_ring(const RingParams& p, const Turn& begin, u32 slot, u64 consumed) {
  const u64 owner = claim(&p.state->owner, p.call);
  if (owner != 0) return owner;
  const Turn now = turn_of(p);
  const bool is_current = now.generation == begin.generation && now.slot == begin.slot &&
                          load_fresh(&p.consumed[slot]) == consumed;
  if (is_current) return 0;
  release_ring(p);
  return p.call;
}

// Behind the last copy.
__device__ inline void complete_push(const RingParams& p, const Turn& turn) {
  char* const done = p.dones + turn.slot * p.ring.done_bytes;
  store_release(reinterpret_cast<u64*>(done), turn.generation);
}

template <u32 kThreads>
class RingReader {
 public:
  static constexpr u32 kAtOnce = kThreads / 4;  // descriptors that come with the word

  struct Shared {
    u64 word;
  };

  __device__ RingReader(const RingParams& p, Shared& shared) : p_(p), shared_(shared) {}

  // Looks at a slot, without its descriptors unless it is `whole`. Returns its word, or 0 where
  // that is none. `alongside` is called by one thread meanwhile, and what it writes to shared
  // memory is seen behind this.
  template <class Alongside>
  __device__ u64 look(u32 number, bool whole, const Alongside& alongside) {
    const char* slot = p_.base + p_.ring.slots_at + number * p_.ring.slot_bytes;
    vectors_ = reinterpret_cast<const uint4*>(slot + kRingLineBytes);
    has_first_ = whole;
    __syncthreads();  // the word of the push before has been read by all
    if (whole && threadIdx.x / 4 < p_.ring.max_descriptors)
      first_ = load_fresh(&vectors_[threadIdx.x]);
    if (threadIdx.x == 0) shared_.word = load_acquire(reinterpret_cast<const u64*>(slot));
    if (threadIdx.x == 32) alongside();
    __syncthreads();
    const u64 word = shared_.word;
    return ring_count(word) <= p_.ring.max_descriptors ? word : 0;
  }

  // Gives `take(number, vector)` the vectors of descriptors [begin, end) of the push that was
  // found, four of each; false where a seal is not the word: they are not a push's.
  template <class Take>
  __device__ bool read(u64 word, u32 begin, u32 end, const Take& take) {
    if (begin == 0 && has_first_) {
      const u32 vectors = 4 * (end < kAtOnce ? end : kAtOnce);
      bool old = threadIdx.x < vectors && !is_sealed(threadIdx.x, first_, word);
      if (__syncthreads_or(old)) {
        // They came before the word did. Now they come behind it.
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
  Shared& shared_;
  const uint4* vectors_ = nullptr;
  uint4 first_{};
  bool has_first_ = false;
};

}  // namespace jitkern
