// A DescriptorRing consumed by kernels. A call is three, each of which starts while the one before
// drains: one block brings what was pushed from the ring into device memory; unpack's own kernel
// copies what it asks for; one block says so in the completion words. As one kernel, of a cluster
// whose first block hands descriptors to the others, 128 x 4 KB took 1.3 us more: 16 SMs copy that
// much more slowly than all, and handing over takes as long as a launch.
#include <jitkern/copy.cuh>
#include <jitkern/pdl.cuh>

#include "serve_ring.cuh"

namespace jitkern {

// Takes up to `most` pushes that are there, in turn, and stages their descriptors.
template <int kThreads, int kMaxOccupancy, bool kUsePdl>
struct StageRing {
  using Params = RingParams;
  using Reader = RingReader<kThreads>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    __shared__ typename Reader::Shared shared;
    __shared__ Turn begin;
    __shared__ u64 consumed;
    __shared__ u64 owner;
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    // One thread looks for all, as another call may change what there is meanwhile.
    if (threadIdx.x == 32) begin = turn_of(p);
    __syncthreads();
    Reader reader(p, shared);
    Turn turn = p.slot < 0 ? begin : Turn{0, static_cast<u32>(p.slot)};
    u32 num_taken = 0, num_staged = 0;
    while (num_taken < p.most) {
      if (threadIdx.x == 32) consumed = load_fresh(&p.consumed[turn.slot]);
      __syncthreads();
      if (p.slot >= 0) turn.generation = consumed + 1;
      const bool is_over = consumed >= turn.generation;  // a call that named its slot took it
      const u64 word = is_over ? 0 : reader.find(turn, true, [&] {
        if (num_taken == 0) owner = take_ring(p, begin, turn, consumed);
      });
      if (!is_over) {
        if (word == 0 || owner != 0) break;
        const u32 count = ring_count(word);
        const bool is_whole = reader.read(word, 0, count, [&](u32 number, uint4 vector) {
          if (number % 4 == 3) {  // what faults call it
            vector.x = number / 4;
            vector.y = turn.slot;
          }
          reinterpret_cast<uint4*>(p.staged + num_staged)[number] = vector;
        });
        if (!is_whole) break;
        if (threadIdx.x == 0) {
          p.consumed[turn.slot] = turn.generation;
          p.taken[num_taken] = {turn.generation, turn.slot};
        }
        num_staged += count;
        ++num_taken;
      }
      __syncthreads();  // what was consumed has been read by all
      turn = turn.next(p.ring.num_slots);
    }
    if (threadIdx.x != 0) return;
    if (owner != 0) return report_fault(p.fault, p.busy, 0, 0, 0);
    p.state->num_taken = num_taken;
    p.state->num_descriptors = num_staged;
    if (p.slot < 0) set_turn(p, turn);
  }
};

// Completes what the call has taken, behind the copies.
template <int kThreads, int kMaxOccupancy, bool kUsePdl>
struct CompleteRing {
  using Params = RingParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    let_next_kernel_start<kUsePdl>();
    if (load_fresh(&p.state->owner) != p.call) return;
    for (u32 i = threadIdx.x; i < p.state->num_taken; i += kThreads) complete_push(p, p.taken[i]);
    __syncthreads();
    if (threadIdx.x == 0) release_ring(p);
  }
};

}  // namespace jitkern
