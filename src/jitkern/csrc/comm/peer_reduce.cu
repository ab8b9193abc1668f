// all_reduce and reduce_scatter of small tensors by writes into peers' memory; see peer_reduce.h.
//
// A thread handles the same vectors of all ranks, from sending to resetting the slots. So the
// threads of a block need not synchronise, and threads of different ranks synchronise by the values
// alone.
#include <jitkern/pdl.cuh>

#include "ops/floats.cuh"
#include "ops/system_memory.cuh"
#include "peer_reduce.h"

namespace jitkern {

// The vectors of a block, by epoch.
struct PeerChunks {
  PeerSpan all;
  u32 num;

  __device__ PeerChunks(PeerSpan all, u32 slot_vecs)
      : all(all), num(all.count <= slot_vecs ? 1 : (all.count + slot_vecs - 1) / slot_vecs) {}

  __device__ PeerSpan chunk(u32 i) const {
    if (num == 1) return all;
    const PeerSpan share = PeerShares::of(all.count, num).share(i);
    return {all.begin + share.begin, share.count};
  }
};

// Tensors, which are aligned to their items only, are accessed by kAccessBytes; slots by 16 bytes.
template <int kType, int kRanks, int kAccessBytes, int kWay, int kThreads, int kMaxOccupancy,
          bool kUsePdl, int kInFlight>
struct PeerReduce {
  using Params = PeerReduceParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr int kItemBytes = item_bytes_of(kType);
  static constexpr int kItems = 16 / kItemBytes;
  static constexpr u32 kNumRanks = kRanks;
  static constexpr bool kToAll = kWay == kOneShot || kWay == kMeet;  // the same to each rank
  static constexpr u32 kLooksOfClock = 256;  // polls per look at the clock: about 200 us
  static_assert(kRanks >= 2 && kRanks <= kMostPeers, "ranks of one host");
  static_assert(kAccessBytes >= kItemBytes, "items are loaded whole");

  static __device__ void run(const Params& p) {
    // Computed before the wait, so that loads begin directly after it.
    const PeerChunks chunks(p.blocks.share(blockIdx.x), p.slots.vecs);
    PeerSpan span = chunks.chunk(0);
    PeerControl* const control = p.control();
    wait_for_earlier_kernels<kUsePdl>();
    // The next kernel may start: it waits for the end of this one.
    let_next_kernel_start<kUsePdl>();
    const u32 epoch = load_fresh(&control->epochs[blockIdx.x]);
    const bool is_intact = load_fresh(&control->intact) == kUnwritten;
    for (u32 i = 0;;) {
      const Epoch current(p, epoch + i, span);
      current.send(is_intact);
      if (i == 0) {
        __syncthreads();  // all have read the epoch; values are being sent meanwhile
        if (threadIdx.x == 0) control->epochs[blockIdx.x] = epoch + chunks.num;
      }
      const bool is_done = is_intact && current.add_up() && current.gather();
      if (++i == chunks.num) return;
      // Other ranks may write in the next epoch only after all threads here have finished this one.
      // Some threads may have no part of the last chunk.
      if (!__syncthreads_and(is_done)) return;
      __threadfence_system();
      span = chunks.chunk(i);
    }
  }

 private:
  using Vector = Words<16>;

  // One thread's part of a block's epoch: the vectors `threadIdx.x + k * blockDim.x`.
  struct Epoch {
    const Params& p;
    const u32 epoch;
    const PeerSpan span;  // the vectors of each part

    __device__ Epoch(const Params& p, u32 epoch, PeerSpan span) : p(p), epoch(epoch), span(span) {}

    // Sends values to the ranks that sum them: in one shot all to all, else to each rank its part.
    // Sends nothing if the workspace is broken.
    __device__ void send(bool is_intact) const {
      if constexpr (kWay == kMeet) __threadfence_system();  // also covers writes of earlier kernels
      constexpr int kDistinct = kToAll ? 1 : kOthers;
      const auto part_of = [&](int k) -> u32 { return kToAll ? 0 : other(k); };
      uint4* to[kOthers];  // in an even epoch
#pragma unroll
      for (int k = 0; k < kOthers; ++k) {
        to[k] = slot(other(k), p.slots.at(0, 0, blockIdx.x, p.rank));
      }
      Vector vectors[kInFlight][kDistinct];
      u32 first = threadIdx.x;
      // Before the epoch is used, so that both loads run at the same time.
      load_all<kDistinct>(vectors, first, part_of);
      const u32 turn = p.slots.turn(0, epoch);
      while (is_intact && first < span.count) {
#pragma unroll
        for (int f = 0; f < kInFlight; ++f) {
          const u32 i = first + f * blockDim.x;
#pragma unroll
          for (int k = 0; k < kOthers; ++k) {
            if (!has(part_of(k), i)) continue;
            store_fresh(to[k] + turn + i, as_sent(vectors[f][kToAll ? 0 : k]).vec);
          }
        }
        first += step();
        if (first < span.count) load_all<kDistinct>(vectors, first, part_of);
      }
    }

    // Sums this rank's part, or in one shot all, to `out`; in two shots also sends the sums to the
    // others. False after the deadline.
    __device__ bool add_up() const {
      const u32 part = kToAll ? 0 : p.rank;
      uint4* const slots = slot(p.rank, p.slots.at(0, epoch, blockIdx.x, 0));
      const i64 at = p.slots.at(1, epoch, blockIdx.x, p.rank);
      for (u32 first = threadIdx.x; has(part, first); first += step()) {
        Vector own[kInFlight][1];
        load_all<1>(own, first, [&](int) -> u32 { return part; });
        Vector vectors[kInFlight][kOthers];
        if (!receive(slots, first, [&](u32) { return part; }, vectors)) return false;
        if (kWay == kMeet) continue;
#pragma unroll
        for (int f = 0; f < kInFlight; ++f) {
          const u32 i = first + f * blockDim.x;
          if (!has(part, i)) continue;
          const Vector sum = sum_of(as_sent(own[f][0]), vectors[f]);
          if (kWay == kTwoShot) {
#pragma unroll
            for (int k = 0; k < kOthers; ++k) store_fresh(slot(other(k), at) + i, sum.vec);
          }
          store(kWay == kScatter ? 0 : p.part_begin(part), part, i, sum);
        }
      }
      if constexpr (kWay == kMeet) __threadfence_system();  // before reads of later kernels
      return true;
    }

    // Stores the sums of the other parts, in two shots.
    __device__ bool gather() const {
      if (kWay != kTwoShot) return true;
      uint4* const slots = slot(p.rank, p.slots.at(1, epoch, blockIdx.x, 0));
      const auto part_of = [](u32 w) { return w; };
      for (u32 first = threadIdx.x; first < span.count; first += step()) {
        Vector vectors[kInFlight][kOthers];
        if (!receive(slots, first, part_of, vectors)) return false;
        each(first, part_of,
             [&](int f, int k, u32 w, u32 i) { store(p.part_begin(w), w, i, vectors[f][k]); });
      }
      return true;
    }

   private:
    static constexpr int kOthers = kRanks - 1;

    __device__ u32 step() const { return kInFlight * blockDim.x; }

    // Waits for the vectors of other ranks, loads all together, and sets their places to unwritten.
    // False after the deadline.
    template <class PartOf>
    __device__ bool receive(uint4* slots, u32 first, const PartOf& part_of,
                            Vector (&vectors)[kInFlight][kOthers]) const {
      u32 missing = 0;  // a bit for each vector
      each(first, part_of, [&](int f, int k, u32, u32) { missing |= 1u << (f * kOthers + k); });
      u64 since = 0;
      for (u32 looks = 1; missing != 0; ++looks) {
        each(first, part_of, [&](int f, int k, u32 w, u32 i) {
          if (missing >> (f * kOthers + k) & 1) {
            vectors[f][k].vec = load_fresh(slots + w * p.slots.vecs + i);
          }
        });
        missing = 0;
        each(first, part_of, [&](int f, int k, u32, u32) {
          if (is_unwritten(vectors[f][k])) missing |= 1u << (f * kOthers + k);
        });
        if (__builtin_expect(looks % kLooksOfClock == 0 && missing != 0, 0)) {
          u32 ranks = 0;
          each(first, part_of, [&](int f, int k, u32 w, u32) {
            if (missing >> (f * kOthers + k) & 1) ranks |= 1u << w;
          });
          if (gives_up(since, ranks)) return false;
        }
      }
      each(first, part_of, [&](int, int, u32 w, u32 i) {
        store_fresh(slots + w * p.slots.vecs + i,
                    make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten));
      });
      return true;
    }
    // Calls `use` for vector `i` of the k-th of the other ranks, which is rank `w`.
    template <class PartOf, class Use>
    __device__ void each(u32 first, const PartOf& part_of, const Use& use) const {
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const u32 i = first + f * blockDim.x;
#pragma unroll
        for (int k = 0; k < kOthers; ++k) {
          const u32 w = k < p.rank ? k : k + 1;
          if (has(part_of(w), i)) use(f, k, w, i);
        }
      }
    }

    __device__ bool gives_up(u64& since, u32 missing) const {
      PeerControl* const control = p.control();
      if (load_fresh(&control->intact) != kUnwritten) return true;  // another thread did
      if (p.deadline_ns == 0) return false;
      const u64 now = nanoseconds();
      if (since == 0) since = now;
      if (now - since < p.deadline_ns) return false;
      if (atomicCAS(&control->intact, kUnwritten, missing) != kUnwritten) return true;
      for (u32 looks = 1; looks % kLooksOfClock != 0 || nanoseconds() - now < p.grace_ns();
           ++looks) {
        load_fresh(&control->intact);
      }
      const u32 blamed = p.blamed(missing, [](const u32* word) { return load_fresh(word); });
      report_fault(p.failure, p.site, blamed, p.number, p.rank);
      report_fault(p.fault, p.site, blamed, p.number, p.rank);
      return true;
    }

    // -- places

    // The other ranks, from the next one on, so that not all ranks write to one.
    __device__ u32 other(int k) const {
      const u32 rank = p.rank + 1 + k;
      return rank < kNumRanks ? rank : rank - kNumRanks;
    }
    __device__ bool has(u32 part, u32 i) const {
      return i < span.count && (kWay != kTwoShot || span.begin + i < p.num_vecs_of(kWay, part));
    }
    __device__ bool is_whole(u32 part, u32 i) const {
      return span.begin + i < p.num_whole_of(kWay, part);
    }
    __device__ i64 offset(u32 i) const { return (span.begin + i) * kPeerVecBytes; }
    __device__ uint4* slot(u32 rank, i64 at) const {
      return reinterpret_cast<uint4*>(p.workspaces[rank] + at);
    }

    // -- vectors

    // Loads the parts `part_of(k)`; zeros after their end. Whole vectors are loaded together,
    // without a branch that would make one load wait for another.
    template <int kDistinct, class PartOf>
    __device__ void load_all(Vector (&vectors)[kInFlight][kDistinct], u32 first,
                             const PartOf& part_of) const {
      if (kWay == kMeet) return;  // zeros
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const u32 i = first + f * blockDim.x;
#pragma unroll
        for (int k = 0; k < kDistinct; ++k) {
          const u32 part = part_of(k);
          if (!has(part, i) || !is_whole(part, i)) continue;
          vectors[f][k] = load_whole(p.x + p.part_begin(part) + offset(i));
        }
      }
      if (p.tail_bytes == 0) return;
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const u32 i = first + f * blockDim.x;
#pragma unroll
        for (int k = 0; k < kDistinct; ++k) {
          const u32 part = part_of(k);
          if (!has(part, i) || is_whole(part, i)) continue;
          vectors[f][k] = load_tail(p.x + p.part_begin(part) + offset(i), p.tail_bytes);
        }
      }
    }
    __device__ void store(i64 part_at, u32 part, u32 i, const Vector& vector) const {
      char* const to = p.out + part_at + offset(i);
      if (is_whole(part, i)) {
        store_whole(to, vector);
      } else {
        store_tail(to, vector, p.tail_bytes);
      }
    }

    static __device__ Vector as_sent(Vector vector) {
#pragma unroll
      for (int k = 0; k < 4; ++k) vector.words[k] = sent_word(vector.words[k]);
      return vector;
    }
    static __device__ bool is_unwritten(const Vector& vector) {
      u32 most = 0;  // the largest of all words
#pragma unroll
      for (int k = 0; k < 4; ++k) most = most < vector.words[k] ? vector.words[k] : most;
      return most == kUnwritten;
    }

    // Adds in rank order and rounds once. The sum is in the form that is sent.
    __device__ Vector sum_of(const Vector& own, const Vector (&vectors)[kOthers]) const {
      const auto vector_of = [&](u32 w) {
        if (kRanks == 2) return w == 0 ? own : vectors[0];  // a + b = b + a
        if (w == p.rank) return own;
        return w < p.rank ? vectors[w < kOthers ? w : 0] : vectors[w > 0 ? w - 1 : 0];
      };
      float sums[kItems];
      floats_of<kType, kItems>(vector_of(0), sums);
#pragma unroll
      for (u32 w = 1; w < kNumRanks; ++w) {
        float values[kItems];
        floats_of<kType, kItems>(vector_of(w), values);
#pragma unroll
        for (int k = 0; k < kItems; ++k) sums[k] = peer_sum(sums[k], values[k]);
      }
      return as_sent(words_of<kType, kItems>(sums));
    }
  };

  static __device__ Vector load_whole(const char* from) {
    Vector vector;
#pragma unroll
    for (int k = 0; k < 16 / kAccessBytes; ++k) {
      const Vec<kAccessBytes> piece = load_vec<kAccessBytes>(from + k * kAccessBytes);
      if constexpr (kAccessBytes == 2) {
        vector.words[k / 2] |= static_cast<u32>(piece) << (k % 2 * 16);
      } else {
        const Words<kAccessBytes> words(piece);
        constexpr int kWords = kAccessBytes / 4;
#pragma unroll
        for (int i = 0; i < kWords; ++i) vector.words[k * kWords + i] = words.words[i];
      }
    }
    return vector;
  }
  static __device__ void store_whole(char* to, const Vector& vector) {
#pragma unroll
    for (int k = 0; k < 16 / kAccessBytes; ++k) {
      if constexpr (kAccessBytes == 2) {
        store_vec<2>(to + k * 2, static_cast<Vec<2>>(vector.words[k / 2] >> (k % 2 * 16)));
      } else {
        Words<kAccessBytes> words;
        constexpr int kWords = kAccessBytes / 4;
#pragma unroll
        for (int i = 0; i < kWords; ++i) words.words[i] = vector.words[k * kWords + i];
        store_vec<kAccessBytes>(to + k * kAccessBytes, words.vec);
      }
    }
  }

  // Loops over items, which take few registers: a part has only one such vector.
  static __device__ Vector load_tail(const char* from, u32 num_bytes) {
    u64 halves[2] = {0, 0};
#pragma unroll 1
    for (u32 at = 0; at < num_bytes; at += kItemBytes) {
      const u64 item = static_cast<u64>(load_vec<kItemBytes>(from + at)) << (at % 8 * 8);
      (at < 8 ? halves[0] : halves[1]) |= item;
    }
    Vector vector;
#pragma unroll
    for (int k = 0; k < 4; ++k) vector.words[k] = static_cast<u32>(halves[k / 2] >> (k % 2 * 32));
    return vector;
  }
  static __device__ void store_tail(char* to, const Vector& vector, u32 num_bytes) {
    const u64 low = u64(vector.words[1]) << 32 | vector.words[0];
    const u64 high = u64(vector.words[3]) << 32 | vector.words[2];
#pragma unroll 1
    for (u32 at = 0; at < num_bytes; at += kItemBytes) {
      const u64 item = (at < 8 ? low : high) >> (at % 8 * 8);
      store_vec<kItemBytes>(to + at, static_cast<Vec<kItemBytes>>(item));
    }
  }
};

}  // namespace jitkern
