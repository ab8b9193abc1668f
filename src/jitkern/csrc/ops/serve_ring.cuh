// A DescriptorRing served: a kernel of few SMs that waits for pushes and copies what they ask for,
// until it is told to stop or nothing comes for long enough. For small pushes: there is no launch
// in front of the copy, and none behind.
#pragma once

#include <jitkern/pdl.cuh>

#include "cluster.cuh"
#include "ring_copy.cuh"
#include "ring_reader.cuh"

namespace jitkern {

// The blocks are one cluster. Its first one reads the ring, into shared memory that all read.
template <int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kPieceInFlight, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments>
struct ServeRing {
  using Params = ServeParams;
  using Reader = RingReader<kThreads>;
  using Copy = RingCopy<kPieceInFlight, kInFlight, kPartsInFlight, kOwnSegments>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;
  static constexpr u32 kChunk = 2 * Reader::kAtOnce;  // descriptors that are handed over at once
  // So many times in a row slots are read with their first descriptors, on suspicion; from then on
  // words alone, so that a server that rests leaves the bus to others. A push then takes one more
  // trip.
  static constexpr u32 kEagerLooks = 64;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    Shared& own = own_shared<Shared>();
    const Shared& first = of_block(own, 0);
    const bool leads = cluster_rank() == 0;
    Reader reader(p.ring, own.reader);
    Turn turn{};
    if (leads) turn = take_over(p.ring, own);
    for (bool ends = false; !ends;) {
      if (leads) wait_for_push(p, reader, turn, own);
      u32 begin = 0, count = 0;
      do {
        if (leads && !own.ends) hand_over(p, reader, begin, own);
        cluster_sync();
        ends = first.ends;
        count = ring_count(first.reader.word);
        if (!ends) copy(p.unpack, first, begin);
        begin += kChunk;
        cluster_sync();
      } while (begin < count && !ends);
      if (leads && threadIdx.x == 0) ends ? leave(p.ring, turn, own) : complete(p.ring, turn);
      turn = turn.next(p.ring.ring.num_slots);
    }
  }

 private:
  struct Shared {
    uint4 vectors[4 * kChunk];
    typename Reader::Shared reader;
    u64 owner;
    Turn turn;  // the first
    u32 slot;
    bool has_long;
    bool is_told;  // to stop
    bool is_idle;  // for long enough
    bool ends;
  };

  // -- the first block

  // Returns the turn to begin with. One thread looks for all, as another call may change it.
  static __device__ Turn take_over(const RingParams& p, Shared& own) {
    if (threadIdx.x == 0) {
      own.turn = turn_of(p);
      own.owner = take_ring(p, own.turn, own.turn.slot, load_fresh(&p.consumed[own.turn.slot]));
      own.ends = own.owner != 0;
      if (own.ends) report_fault(p.fault, p.busy, 0, 0, 0);
    }
    __syncthreads();
    return own.turn;
  }

  // Until there is one, or the server ends. Told to stop it begins with none that is there: it
  // would run on for as long as a producer always has one.
  static __device__ void wait_for_push(const Params& p, Reader& reader, Turn& turn, Shared& own) {
    while (load_fresh(&p.ring.consumed[turn.slot]) >= turn.generation) {
      turn = turn.next(p.ring.ring.num_slots);  // a call that named its slot took it
    }
    if (threadIdx.x == 0) own.slot = turn.slot;
    const u64 since = nanoseconds();
    const auto look_at_end = [&] {
      own.is_told = load_fresh(p.stop) != 0;
      own.is_idle = nanoseconds() - since > p.idle_ns;
    };
    for (u32 looks = 0; !own.ends; ++looks) {
      const u64 word = reader.look(turn.slot, looks < kEagerLooks, look_at_end);
      if (ring_generation(word) == turn.generation && !own.is_told) return;
      if (own.is_told || own.is_idle) own.ends = true;  // of all threads
      __syncthreads();
    }
  }

  // The descriptors from `begin` on of the push that was found.
  static __device__ void hand_over(const Params& p, Reader& reader, u32 begin, Shared& own) {
    const u64 word = own.reader.word;
    const u32 size = size_of(ring_count(word), begin);
    bool is_long = false;
    const bool is_whole = reader.read(word, begin, begin + size, [&](u32 number, uint4 vector) {
      if (number % 4 == 1) is_long |= Copy::may_be_long(vector);
      if (number % 4 == 3) {  // what faults call it
        vector.x = number / 4;
        vector.y = own.slot;
      }
      own.vectors[number - 4 * begin] = vector;
    });
    const bool has_long = __syncthreads_or(is_long);
    if (threadIdx.x != 0) return;
    own.has_long = has_long;
    if (!is_whole) {
      report_fault(p.ring.fault, p.ring.broken, own.slot, 0, 0);
      own.ends = true;
    }
  }

  // What all blocks have copied, as the barrier behind it says.
  static __device__ void complete(const RingParams& p, const Turn& turn) {
    p.consumed[turn.slot] = turn.generation;
    complete_push(p, turn);
  }

  static __device__ void leave(const RingParams& p, const Turn& turn, const Shared& own) {
    if (own.owner != 0) return;
    set_turn(p, turn);
    release_ring(p);
  }

  // -- all blocks

  static __device__ u32 size_of(u32 count, u32 begin) {
    return count - begin < kChunk ? count - begin : kChunk;
  }
  static __device__ u32 all_warps() { return cluster_size() * kWarps; }

  static __device__ void copy(const UnpackParams& p, const Shared& first, u32 begin) {
    const u32 size = size_of(ring_count(first.reader.word), begin);
    const u32 warp = threadIdx.x / 32 * cluster_size() + cluster_rank();
    Copy::copy(p, first.vectors, size, first.has_long, warp, all_warps());
  }
};

}  // namespace jitkern
