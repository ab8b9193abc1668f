// Small tensors, summed over the ranks of one host: by memory that each rank can write into the
// others', its workspace. How that lies, and what kernels and the CPU are told.
//
// A message is cut among blocks; block b of every rank does the same part of it. There are no flags
// and no barriers: a rank writes its values into the others' workspaces, and a value that is there
// is a message of its own. A workspace holds, twice (by the parity of an epoch), for each block and
// each writer a slot of vectors, all words of which are `kUnwritten` at first. In an epoch a block
//   1. writes its vectors to its slot in every other rank's workspace,
//   2. looks at its own slots until no word is unwritten any more,
//   3. adds up what came, in the order of ranks: all ranks get the same bits,
//   4. makes unwritten again what it has read.
// The epochs of a call are counted in the own workspace once all threads of the block have read the
// count: while values are on their way, so that nothing waits for it. A call that fails counts as
// well, its workspace is broken. A message larger than slots takes several epochs.
// In two shots each rank does so with one part of the message only, and writes the sum to slots of
// a second stage, which the others wait for: less is sent, but there are two trips.
//
// Words: those of 32 bits come whole, but the four of a vector in any order, as PTX promises no
// more of a store of 16 bytes. So each word is looked at.
//
// Values: `kUnwritten` is a NaN of 32 bits, and two of 16, of either type. A word of values that
// has these bits is sent, and counted, as the one below it, which is NaN, or two, as well. So any
// values may come: of numbers all bits are kept, of a NaN that it is one.
//
// Why two parities are enough: slots of epoch e are written again in e + 2. A rank gets there when
// it has ended e + 1, for which it needed a value of every rank (in two shots by way of the one
// that has summed it). Each of these was sent behind the end of e, of the whole block, with all
// that it read and made unwritten: those are different kernels, or there are a barrier and a fence.
// With programmatic dependent launch nothing may be sent, or the count be read, before the kernel
// in front has ended: one may be launched as soon as that has begun, but waits then. With one
// parity another rank would write in e + 1 what is not read yet. Blocks have epochs of their own,
// so that calls of different grids may follow each other: those that take part in a call count
// alike on all ranks.
#pragma once

#include "ops/floats.h"

namespace jitkern {

constexpr int kMostPeers = 8;
// All are resident, beside other work, on any GPU that there is: they wait for each other.
constexpr u32 kMostPeerBlocks = 64;
constexpr u32 kUnwritten = 0xffffffff;
constexpr i64 kPeerVecBytes = 16;

// One shot, two, the first of two with the sum as result, and one shot of a vector of zeros that
// nobody sums: a barrier, behind which each rank sees what the others wrote in front of it.
enum PeerWay : int { kOneShot, kTwoShot, kScatter, kMeet };

// The bits of values as they are sent.
JITKERN_HOST_DEVICE constexpr u32 sent_word(u32 word) {
  return word < kUnwritten - 1 ? word : kUnwritten - 1;
}

// As GPUs add, whose NaN is always the same.
JITKERN_HOST_DEVICE inline float peer_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return a + b;
#else
  const float sum = a + b;
  return sum == sum ? sum : float_of_bits(0x7fffffff);
#endif
}

struct PeerSpan {
  u32 begin;
  u32 count;
};

// How `total` things are shared out: as equally as can be, the first `longer` get one more.
struct PeerShares {
  u32 each;
  u32 longer;

  JITKERN_HOST_DEVICE static PeerShares of(u32 total, u32 num) {
    return {total / num, total % num};
  }
  JITKERN_HOST_DEVICE PeerSpan share(u32 i) const {
    return {i * each + (i < longer ? i : longer), each + (i < longer ? 1 : 0)};
  }
};

// What a workspace begins with, for its own rank alone. A new one has all bytes 0xff, this too.
struct PeerControl {
  u32 epochs[kMostPeerBlocks];
  u32 intact;  // kUnwritten, or the ranks that this one has waited for in vain, as bits: broken
};
constexpr i64 kPeerControlBytes = 1024;
static_assert(sizeof(PeerControl) <= kPeerControlBytes, "slots lie behind it");

// Where the slots are.
struct PeerSlots {
  u32 num_ranks;
  u32 vecs;  // of a slot

  // The first of a stage and epoch, in vectors behind the first of all.
  JITKERN_HOST_DEVICE u32 turn(int stage, u32 epoch) const {
    return (static_cast<u32>(stage) * 2 + epoch % 2) * kMostPeerBlocks * num_ranks * vecs;
  }
  // Slots of the writers follow each other.
  JITKERN_HOST_DEVICE i64 at(int stage, u32 epoch, u32 block, u32 writer) const {
    const u32 slot = (block * num_ranks + writer) * vecs;
    return kPeerControlBytes + static_cast<i64>(turn(stage, epoch) + slot) * kPeerVecBytes;
  }
  JITKERN_HOST_DEVICE i64 workspace_bytes() const { return at(2, 0, 0, 0); }
};

struct PeerReduceParams {
  const char* x;
  char* out;
  // Part i of x, which rank i sums, begins at i * part_bytes, and a vector later for each of the
  // parts in front of it that are longer. In one shot it is all of x.
  i64 part_bytes;
  u32 longer_parts;
  u32 tail_bytes;  // of a part's last vector, in two shots of the last part's, where not 16
  u32 rank;
  u32 num_vecs;       // of the longest part
  PeerShares blocks;  // of these
  PeerSlots slots;
  char* workspaces[kMostPeers];  // by rank, as this one sees them
  u64 deadline_ns;               // for each wait; 0: none
  u32 number;                    // of the call
  FaultSite site;
  FaultRecord* failure;  // the reducer's own
  FaultRecord* fault;    // the device's

  JITKERN_HOST_DEVICE i64 part_begin(u32 i) const {
    return i * part_bytes + (i < longer_parts ? i : longer_parts) * kPeerVecBytes;
  }
  // Vectors of part i; all of 16 bytes but for one of `tail_bytes` at its end.
  JITKERN_HOST_DEVICE u32 num_vecs_of(int way, u32 i) const {
    return way == kTwoShot && longer_parts > 0 && i >= longer_parts ? num_vecs - 1 : num_vecs;
  }
  JITKERN_HOST_DEVICE u32 num_whole_of(int way, u32 i) const {
    const bool has_tail = tail_bytes > 0 && (way != kTwoShot || i == slots.num_ranks - 1);
    return num_vecs_of(way, i) - (has_tail ? 1 : 0);
  }
  JITKERN_HOST_DEVICE PeerControl* control_of(u32 i) const {
    return reinterpret_cast<PeerControl*>(workspaces[i]);
  }
  JITKERN_HOST_DEVICE PeerControl* control() const { return control_of(rank); }

  // Who is to blame that ranks are missing: of one that has waited in vain itself, for whom it has.
  // `intact_of` reads that word of a rank.
  template <class IntactOf>
  JITKERN_HOST_DEVICE u32 blamed(u32 missing, const IntactOf& intact_of) const {
    u32 seen = missing, given_up = 0;
    for (u32 round = 0; round < slots.num_ranks; ++round) {
      for (u32 i = 0; i < slots.num_ranks; ++i) {
        if (!((seen & ~given_up) >> i & 1)) continue;
        const u32 word = intact_of(&control_of(i)->intact);
        if (word == kUnwritten) continue;
        given_up |= 1u << i;
        seen |= word & ~(1u << rank);
      }
    }
    return (seen & ~given_up) != 0 ? seen & ~given_up : missing;
  }
  // What ranks that wait for each other get to give up, before one of them says whom it blames.
  JITKERN_HOST_DEVICE u64 grace_ns() const { return deadline_ns / 8; }
};

// Of a block's vectors: those of one epoch, of as many as it takes.
struct PeerChunks {
  PeerSpan all;
  u32 num;

  JITKERN_HOST_DEVICE PeerChunks(PeerSpan all, u32 slot_vecs)
      : all(all), num(all.count <= slot_vecs ? 1 : (all.count + slot_vecs - 1) / slot_vecs) {}

  JITKERN_HOST_DEVICE PeerSpan chunk(u32 i) const {
    if (num == 1) return all;
    const PeerSpan share = PeerShares::of(all.count, num).share(i);
    return {all.begin + share.begin, share.count};
  }
};

}  // namespace jitkern
