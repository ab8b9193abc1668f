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
          u32 kPartsInFlight, u32 kShortSegments, u32 kOwnSegments>
struct ConsumeRing {
  using Params = ConsumeParams;
  using Reader = RingReader<kThreads>;
  using Copy = RingCopy<kPieceInFlight, kInFlight, kPartsInFlight, kShortSegments, kOwnSegments>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr u32 kWarps = kThreads / 32;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    if (blockIdx.x == 0) lead(p);
    const u64 control = wait_for_control(p.board);
    Copy::copy(p.unpack, reinterpret_cast<const uint4*>(p.staged), control_count(control),
               control_has_long(control), threadIdx.x / 32 * gridDim.x + blockIdx.x,
               gridDim.x * kWarps);
    end(p);
  }

 private:
  struct Lead {
    typename Reader::Shared reader;
    u64 owner;
  };
  struct Control {
    u64 value;
  };
  struct End {
    bool is_last;
  };

  // -- the first block

  // Takes up to `most` pushes, in turn, and leaves their descriptors to all.
  static __device__ void lead(const Params& p) {
    Lead& own = own_shared<Lead>();
    const RingParams& ring = p.ring;
    const Turn begin = turn_of(ring);
    Reader reader(ring, own.reader);
    Turn turn = p.slot < 0 ? begin : Turn{0, static_cast<u32>(p.slot)};
    u32 num_taken = 0, num_staged = 0;
    bool has_long = false;
    while (num_taken < p.most) {
      const u64 consumed = load_fresh(&ring.consumed[turn.slot]);
      if (p.slot >= 0) turn.generation = consumed + 1;
      const bool is_over = consumed >= turn.generation;  // a call that named its slot took it
      if (!is_over) {
        const u64 word = reader.find(turn, true, [&] {
          if (num_taken == 0) own.owner = take_ring(ring, begin, turn, consumed);
        });
        if (word == 0 || own.owner != 0 || !stage(p, reader, word, turn, num_staged, has_long))
          break;
        if (threadIdx.x == 0) {
          ring.consumed[turn.slot] = turn.generation;
          p.taken[num_taken] = {turn.generation, turn.slot};
        }
        num_staged += ring_count(word);
        ++num_taken;
      }
      turn = turn.next(ring.ring.num_slots);
      __syncthreads();  // what is consumed, and what was staged, all have seen
    }
    has_long = __syncthreads_or(has_long);
    if (threadIdx.x != 0) return;
    const bool is_owner = own.owner == 0;
    if (!is_owner) report_fault(ring.fault, ring.busy, 0, 0, 0);
    if (is_owner && p.slot < 0) set_turn(ring, turn);
    p.board->num_taken = num_taken;
    p.board->is_owner = is_owner;
    store_control(&p.board->control, ring_control(num_staged, has_long));
  }

  static __device__ bool stage(const Params& p, Reader& reader, u64 word, const Turn& turn,
                               u32 num_staged, bool& has_long) {
    uint4* const to = reinterpret_cast<uint4*>(p.staged + num_staged);
    return reader.read(word, 0, ring_count(word), [&](u32 number, uint4 vector) {
      if (number % 4 == 1) has_long |= Copy::may_be_long(vector);
      if (number % 4 == 3) {  // what faults call it
        vector.x = number / 4;
        vector.y = turn.slot;
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

  // The last block that comes here finds all copied.
  static __device__ void end(const Params& p) {
    End& own = own_shared<End>();
    RingBoard* const board = p.board;
    __syncthreads();
    if (threadIdx.x == 0) {
      // What the block has copied; a destination may be in host memory.
      p.unpack.writes_host ? __threadfence_system() : __threadfence();
      own.is_last = atomicAdd(&board->num_arrived, 1u) == gridDim.x - 1;
      __threadfence();
    }
    __syncthreads();
    if (!own.is_last) return;
    for (u32 i = threadIdx.x; i < board->num_taken; i += kThreads) {
      complete_push(p.ring, p.taken[i]);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const bool is_owner = board->is_owner != 0;
    *board = {};
    if (is_owner) release_ring(p.ring);
  }
};

}  // namespace jitkern
