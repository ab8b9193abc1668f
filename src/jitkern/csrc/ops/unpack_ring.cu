// A DescriptorRing consumed by a kernel: it takes the pushes that are there, copies what they ask
// for and completes them.
//
// The first block reads the ring, and leaves descriptors in device memory to all. So there is one
// launch, of 2.2 us of the host, where two kernels, one for each step, took two and 2 us more of
// the GPU; and a cluster of 16 blocks, which hand over faster, copied 128 x 4 KB more slowly by 1.5
// us than 132 do. Blocks wait for the first one, which waits for none and is launched first.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "cluster.cuh"
#include "ring_copy.cuh"
#include "ring_reader.cuh"
#include "serve_ring.cuh"

namespace jitkern {

template <int kThreads, int kMaxOccupancy, bool kUsePdl, u32 kPieceInFlight, u32 kInFlight,
          u32 kPartsInFlight, u32 kOwnSegments>
struct ConsumeRing {
  using Params = ConsumeParams;
  using Reader = RingReader<kThreads>;
  using Copy = RingCopy<kPieceInFlight, kInFlight, kPartsInFlight, kOwnSegments>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    Lead& lead = own_shared<Lead>();
    if (blockIdx.x == 0) take(p, lead);
    const u64 control = wait_for_control(p.board);
    Copy::copy(p.unpack, reinterpret_cast<const uint4*>(p.staged), control_count(control),
               control_has_long(control), threadIdx.x / 32 * gridDim.x + blockIdx.x,
               gridDim.x * kWarps);
    __syncthreads();
    if (blockIdx.x == 0) {
      complete(p, lead);
    } else if (threadIdx.x == 0) {
      // What the block has copied; a destination may be in host memory.
      p.unpack.writes_host ? __threadfence_system() : __threadfence();
      atomicAdd(&p.board->num_arrived, 1u);
    }
  }

 private:
  struct Lead {
    typename Reader::Shared reader;
    u64 owner;
    u64 consumed;  // of the slot that is looked at
    Turn begin;    // what is next in turn
    Turn first;    // what was taken
    u32 num_taken;
  };
  struct Control {
    u64 value;
  };

  // -- the first block

  // Takes up to `most` pushes, one slot after the other, and leaves their descriptors to all.
  static __device__ void take(const Params& p, Lead& own) {
    const RingParams& ring = p.ring;
    // One thread looks for all, as another call may change what there is at any moment.
    if (threadIdx.x == 0) own.begin = turn_of(ring);
    __syncthreads();
    const Turn begin = own.begin;
    Reader reader(ring, own.reader);
    Turn turn = p.slot < 0 ? begin : Turn{0, static_cast<u32>(p.slot)};
    u32 num_taken = 0, num_staged = 0;
    bool has_long = false;
    for (u32 looks = 0; num_taken < p.most; ++looks) {
      const u64 word = reader.look(turn.slot, true, [&] {
        own.consumed = load_fresh(&ring.consumed[turn.slot]);
        if (looks == 0) own.owner = take_ring(ring, begin, turn.slot, own.consumed);
      });
      const u64 consumed = own.consumed;
      if (p.slot >= 0) turn.generation = consumed + 1;
      const bool is_over = consumed >= turn.generation;  // a call that named its slot took it
      if (own.owner != 0 || (is_over && num_taken > 0)) break;
      if (!is_over) {
        if (ring_generation(word) != turn.generation) break;
        if (!stage(p, reader, word, turn.slot, num_staged, has_long)) break;
        if (threadIdx.x == 0 && num_taken == 0) own.first = turn;
        if (threadIdx.x == 0) ring.consumed[turn.slot] = turn.generation;
        num_staged += ring_count(word);
        ++num_taken;
      }
      turn = turn.next(ring.ring.num_slots);
    }
    has_long = __syncthreads_or(has_long);  // and all that was staged is there
    if (threadIdx.x != 0) return;
    store_control(&p.board->control, ring_control(num_staged, has_long));
    own.num_taken = num_taken;
    if (own.owner != 0) return report_fault(ring.fault, ring.busy, 0, 0, 0);
    if (p.slot < 0) set_turn(ring, turn);
  }

  static __device__ bool stage(const Params& p, Reader& reader, u64 word, u32 slot, u32 num_staged,
                               bool& has_long) {
    uint4* const to = reinterpret_cast<uint4*>(p.staged + num_staged);
    return reader.read(word, 0, ring_count(word), [&](u32 number, uint4 vector) {
      if (number % 4 == 1) has_long |= Copy::may_be_long(vector);
      if (number % 4 == 3) {  // what faults call it
        vector.x = number / 4;
        vector.y = slot;
      }
      to[number] = vector;
    });
  }

  // -- all blocks

  static __device__ u64 wait_for_control(const RingBoard* board) {
    Control& own = own_shared<Control>();
    if (threadIdx.x == 0) {
      while ((own.value = load_control(&board->control)) == 0) continue;
    }
    __syncthreads();
    return own.value;
  }

  // Behind the copies of all, by the first block.
  static __device__ void complete(const Params& p, const Lead& own) {
    if (threadIdx.x != 0) return;
    while (load_control(&p.board->num_arrived) != gridDim.x - 1) continue;
    Turn turn = own.first;
    for (u32 i = 0; i < own.num_taken; ++i, turn = turn.next(p.ring.ring.num_slots)) {
      // From a slot on, the push that is newest may be followed by the one that is oldest.
      if (p.slot >= 0) turn.generation = load_fresh(&p.ring.consumed[turn.slot]);
      complete_push(p.ring, turn);
    }
    *p.board = {};
    if (own.owner == 0) release_ring(p.ring);
  }
};

}  // namespace jitkern
