// Sums of small tensors over the ranks of one host. Each rank writes into the workspaces of all
// others. This file has their layout and the parameters of the kernels in peer_reduce.cu.
//
// A message is split among blocks; block b of every rank has the same part. There are no flags and
// no barriers: a rank writes its values into the others' workspaces, and each value is its own
// flag. A workspace has a slot of vectors per block and writer, twice, by the parity of an epoch.
// All words of a slot start as `kUnwritten`. In an epoch a block
//   1. writes its vectors to its slot in every other rank's workspace,
//   2. polls its own slots until no word is unwritten,
//   3. adds the values in rank order, so all ranks get the same bits,
//   4. sets the words that it has read to unwritten.
// A block counts its epochs in its own workspace, after all of its threads have read the count; its
// values are being sent meanwhile. A call that fails counts too, and breaks its workspace. A
// message larger than the slots takes several epochs. In two shots each rank does this with one
// part of the message, and writes the sum to slots of a second stage, which the others poll: it
// sends less, in two trips.
//
// Words: 32 bits arrive whole, but the four words of a vector in any order. PTX promises no more
// for a store of 16 bytes, so each word is checked.
//
// Values: `kUnwritten` is a NaN of 32 bits, and two NaNs of 16 bits in either type. A word of
// values with these bits is sent and added as the word below it, which is also NaN. So numbers keep
// all bits, and NaN stays NaN.
//
// Why two parities are enough: slots of epoch e are written again in e + 2. A rank gets there after
// e + 1, for which it needs a value of every rank (in two shots through the rank that sums it).
// Each rank sends that value after its whole block has finished e, including reads and resets:
// epochs are in different kernels, or separated by a barrier and a fence. With programmatic
// dependent launch a kernel sends nothing, and reads no count, before the previous one has ended.
// With one parity another rank would overwrite values in e + 1 that are not read yet. Each block
// counts its own epochs: grids may differ between calls, but not between the ranks of a call.
#pragma once

#include "ops/floats.h"

namespace jitkern {

constexpr int kMostPeers = 8;
// Blocks wait for each other, so all must be resident, on any GPU and beside other work.
constexpr u32 kMostPeerBlocks = 64;
constexpr u32 kUnwritten = 0xffffffff;
constexpr i64 kPeerVecBytes = 16;

// One shot; two shots; the first shot of two, whose sum is the result; and a barrier, which is one
// shot of a vector of zeros. After it each rank sees what the others wrote before it.
enum PeerWay : int { kOneShot, kTwoShot, kScatter, kMeet };

// The bits of values as they are sent.
JITKERN_HOST_DEVICE constexpr u32 sent_word(u32 word) {
  return word < kUnwritten - 1 ? word : kUnwritten - 1;
}

// Adds as GPUs do, which have one NaN as a result.
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

// Splits `total` items evenly; the first `longer` shares have one more.
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

// The begin of a workspace, for its own rank. All bytes of a new workspace are 0xff.
struct PeerControl {
  u32 epochs[kMostPeerBlocks];
  u32 intact;  // kUnwritten, or if the workspace is broken the missing ranks, as bits
};
constexpr i64 kPeerControlBytes = 1024;
static_assert(sizeof(PeerControl) <= kPeerControlBytes, "slots come after it");

// The places of slots.
struct PeerSlots {
  u32 num_ranks;
  u32 vecs;  // per slot

  // The first slot of a stage and epoch, in vectors from the first slot.
  JITKERN_HOST_DEVICE u32 turn(int stage, u32 epoch) const {
    return (static_cast<u32>(stage) * 2 + epoch % 2) * kMostPeerBlocks * num_ranks * vecs;
  }
  // The slot of a writer, in bytes from the workspace's begin.
  JITKERN_HOST_DEVICE i64 at(int stage, u32 epoch, u32 block, u32 writer) const {
    const u32 slot = (block * num_ranks + writer) * vecs;
    return kPeerControlBytes + static_cast<i64>(turn(stage, epoch) + slot) * kPeerVecBytes;
  }
  JITKERN_HOST_DEVICE i64 workspace_bytes() const { return at(2, 0, 0, 0); }
};

struct PeerReduceParams {
  const char* x;
  char* out;
  // Rank i sums part i of x, which begins at i * part_bytes plus a vector per longer part before
  // it. In one shot a part is all of x.
  i64 part_bytes;
  u32 longer_parts;
  u32 tail_bytes;  // in a part's last vector unless 16; in two shots, in the last part
  u32 rank;
  u32 num_vecs;       // in the longest part
  PeerShares blocks;  // the vectors of each block
  PeerSlots slots;
  char* workspaces[kMostPeers];  // addresses in this process, by rank
  u64 deadline_ns;               // limit of each wait; 0: none
  u32 number;                    // call number
  FaultSite site;
  FaultRecord* failure;  // the reducer's own
  FaultRecord* fault;    // the device's

  JITKERN_HOST_DEVICE i64 part_begin(u32 i) const {
    return i * part_bytes + (i < longer_parts ? i : longer_parts) * kPeerVecBytes;
  }
  // The vectors of part i. All have 16 bytes, except a last one of `tail_bytes`.
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

  // The ranks that caused a timeout. If a missing rank has itself timed out, these are the ranks
  // that it waited for. `intact_of` reads `PeerControl::intact` of a rank.
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
  // How long a rank waits for others to time out, before it names the ranks that caused it.
  JITKERN_HOST_DEVICE u64 grace_ns() const { return deadline_ns / 8; }
};

#ifndef __CUDACC_RTC__

struct PeerResult {
  enum Kind { kDone, kBroken, kLate, kInterrupted } kind;
  u32 missing;  // ranks, as bits
};

// The call of a rank on the CPU. It uses the workspaces, the part and the deadline of `params`, and
// polls `is_interrupted`. Unless it is done, the workspace is broken.
PeerResult peer_reduce_by_cpu(const PeerReduceParams& params, PeerWay way, int type,
                              bool (*is_interrupted)());

#endif

}  // namespace jitkern
