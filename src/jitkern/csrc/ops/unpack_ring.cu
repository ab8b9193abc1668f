// A kernel consumes a DescriptorRing: it takes the pushes that are present, copies their pieces and
// completes them.
//
// The first block reads the ring and stages the descriptors in device memory; the others wait for
// it. This is one launch, which takes 2.2 us on the host. Two kernels took 2 us more on the GPU. A
// cluster has 16 blocks, which hand over faster, but copied 128 x 4 KB in 1.5 us more than 132
// blocks.
#include <jitkern/pdl.cuh>

#include "ring.cuh"

namespace jitkern {

template <int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kPieceInFlight, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments>
struct ConsumeRing {
  using Params = ConsumeParams;
  using Copy = RingCopy<kPieceInFlight, kInFlight, kPartsInFlight, kOwnSegments>;
  using Reader = RingReader<kThreads, Copy>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    __shared__ Lead lead;
    if (blockIdx.x == 0) take(p, lead);
    const u64 control = wait_for_control(p.board);
    Copy::copy(p.unpack, reinterpret_cast<const uint4*>(p.staged), control_count(control),
               control_has_long(control), threadIdx.x / 32 * gridDim.x + blockIdx.x,
               gridDim.x * kWarps);
    __syncthreads();
    if (blockIdx.x == 0) {
      complete(p, lead);
    } else if (threadIdx.x == 0) {
      // Its copies are seen before its arrival; a destination may be in host memory.
      p.unpack.writes_host ? __threadfence_system() : __threadfence();
      atomicAdd(&p.board->num_arrived, 1u);
    }
  }

 private:
  struct Lead {
    u64 word;
    u64 owner;
    Turn begin;  // the first push to take
    u32 num_taken;
  };

  // -- the first block

  // Takes up to `most` pushes, one slot after the other, and stages their descriptors for all
  // blocks.
  static __device__ void take(const Params& p, Lead& own) {
    const RingParams& ring = p.ring;
    // One thread reads for all, as another call may change the state meanwhile.
    if (threadIdx.x == 0) own.begin = turn_of(ring);
    __syncthreads();
    const Turn begin = own.begin;
    Reader reader(ring, own.word);
    Turn turn = begin;
    u32 num_taken = 0, num_staged = 0;
    bool has_long = false;
    for (; num_taken < p.most; ++num_taken) {
      const u64 word = reader.look(turn.slot, true, [&] {
        if (num_taken == 0) own.owner = take_ring(ring, begin);
      });
      if (own.owner != 0 || ring_generation(word) != turn.generation) break;
      if (!reader.read(word, turn, 0, ring_count(word), p.staged + num_staged, has_long)) break;
      num_staged += ring_count(word);
      turn = turn.next(ring.ring.num_slots);
    }
    has_long = __syncthreads_or(has_long);  // also waits for all descriptors to be staged
    if (threadIdx.x != 0) return;
    store_control(&p.board->control, ring_control(num_staged, has_long));
    own.num_taken = num_taken;
    if (own.owner != 0) return report_fault(ring.fault, ring.busy, 0, 0, 0);
    set_turn(ring, turn);
  }

  // -- all blocks

  static __device__ u64 wait_for_control(const RingBoard* board) {
    __shared__ u64 control;
    if (threadIdx.x == 0) {
      while ((control = load_control(&board->control)) == 0) continue;
    }
    __syncthreads();
    return control;
  }

  // The first block calls it, and waits for the copies of all blocks.
  static __device__ void complete(const Params& p, const Lead& own) {
    if (threadIdx.x != 0) return;
    while (load_control(&p.board->num_arrived) != gridDim.x - 1) continue;
    Turn turn = own.begin;
    for (u32 i = 0; i < own.num_taken; ++i, turn = turn.next(p.ring.ring.num_slots)) {
      complete_push(p.ring, turn);
    }
    *p.board = {};
    if (own.owner == 0) release_ring(p.ring);
  }
};

// A server: a kernel of one block that waits for pushes and copies their pieces, until it is
// stopped or has been idle for long enough. For small pushes: there is no launch before or after
// the copy.
template <int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kPieceInFlight, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments>
struct ServeRing {
  using Params = ServeParams;
  using Copy = RingCopy<kPieceInFlight, kInFlight, kPartsInFlight, kOwnSegments>;
  using Reader = RingReader<kThreads, Copy>;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;
  static constexpr u32 kChunk = 2 * Reader::kAtOnce;  // descriptors that are staged at once
  // After so many looks in a row without a push, a look reads the word alone, so that an idle
  // server leaves the bus to others. The next push then takes one more trip.
  static constexpr u32 kEagerLooks = 64;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    __shared__ Shared own;
    Reader reader(p.ring, own.word);
    Turn turn = take_over(p.ring, own);
    for (bool ends = false; !ends; turn = turn.next(p.ring.ring.num_slots)) {
      wait_for_push(p, reader, turn, own);
      u32 begin = 0, count = 0;
      do {
        if (!own.ends) stage(p, reader, turn, begin, own);
        __syncthreads();
        ends = own.ends;
        count = ring_count(own.word);
        const u32 warp = threadIdx.x / 32, size = size_of(count, begin);
        if (!ends) Copy::copy(p.unpack, own.vectors, size, own.has_long, warp, kWarps);
        begin += kChunk;
        __syncthreads();
      } while (begin < count && !ends);
      if (threadIdx.x == 0) ends ? leave(p.ring, turn, own) : complete_push(p.ring, turn);
    }
  }

 private:
  struct Shared {
    uint4 vectors[4 * kChunk];
    u64 word;
    u64 owner;
    Turn turn;  // the server's first
    bool has_long;
    bool is_told;  // `stop` asks the server to end
    bool is_idle;  // there was no push for idle_ns
    bool ends;
  };

  // Returns the turn to begin with.
  static __device__ Turn take_over(const RingParams& p, Shared& own) {
    if (threadIdx.x == 0) {
      own.turn = turn_of(p);
      own.owner = take_ring(p, own.turn);
      own.ends = own.owner != 0;
      if (own.ends) report_fault(p.fault, p.busy, 0, 0, 0);
    }
    __syncthreads();
    return own.turn;
  }

  // Waits for a push, or the server's end. A server told to stop takes no further push: a busy
  // producer would keep it running.
  static __device__ void wait_for_push(const Params& p, Reader& reader, const Turn& turn,
                                       Shared& own) {
    const u64 since = nanoseconds();
    const auto look_at_end = [&] {
      own.is_told = load_fresh(p.stop) != 0;
      own.is_idle = nanoseconds() - since > p.idle_ns;
    };
    for (u32 looks = 0; !own.ends; ++looks) {
      const u64 word = reader.look(turn.slot, looks < kEagerLooks, look_at_end);
      if (ring_generation(word) == turn.generation && !own.is_told) return;
      if (own.is_told || own.is_idle) own.ends = true;  // every thread sets it
      __syncthreads();
    }
  }

  // Reads the descriptors of the push from `begin` on into shared memory.
  static __device__ void stage(const Params& p, Reader& reader, const Turn& turn, u32 begin,
                               Shared& own) {
    const u64 word = own.word;
    const u32 size = size_of(ring_count(word), begin);
    bool is_long = false;
    const bool is_whole = reader.read(word, turn, begin, begin + size, own.vectors, is_long);
    const bool has_long = __syncthreads_or(is_long);
    if (threadIdx.x != 0) return;
    own.has_long = has_long;
    if (!is_whole) {
      report_fault(p.ring.fault, p.ring.broken, turn.slot, 0, 0);
      own.ends = true;
    }
  }

  static __device__ void leave(const RingParams& p, const Turn& turn, const Shared& own) {
    if (own.owner != 0) return;
    set_turn(p, turn);
    release_ring(p);
  }

  static __device__ u32 size_of(u32 count, u32 begin) {
    return count - begin < kChunk ? count - begin : kChunk;
  }
};

}  // namespace jitkern
