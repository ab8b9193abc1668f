// all_reduce and reduce_scatter of small tensors over memory that GPUs write into each other's; how
// is in peer_reduce.h.
//
// A thread has the same vectors of all ranks, from what it sends to what it makes unwritten again,
// so threads of a block have nothing to tell each other, and those of several ranks meet by the
// values alone.
#include <jitkern/pdl.cuh>

#include "ops/floats.cuh"
#include "ops/system_memory.cuh"
#include "peer_reduce.h"

namespace jitkern {

// kAccessBytes: of tensors, which may lie at any multiple of their items. Slots are read and
// written by vectors of 16 bytes.
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
  static constexpr u32 kLooksOfClock = 256;  // between two looks at the clock: some 200 us
  static_assert(kRanks >= 2 && kRanks <= kMostPeers, "ranks of one host");
  static_assert(kAccessBytes >= kItemBytes, "items are loaded whole");

  static __device__ void run(const Params& p) {
    wait_for_earlier_kernels<kUsePdl>();
    PeerControl* const control = p.control();
    const u32 epoch = load_fresh(&control->epochs[blockIdx.x]);
    const bool is_intact = load_fresh(&control->intact) == kUnwritten;
    const PeerChunks chunks(p.blocks.share(blockIdx.x), p.slots.vecs);
    bool is_done = true;
    for (u32 i = 0; i < chunks.num; ++i) {
      if (i > 0) {
        // What other ranks write in the next epoch is behind what all threads did in the last one:
        // the last chunk may be one that some threads have nothing of.
        if (!__syncthreads_and(is_done)) break;
        __threadfence_system();
      }
      is_done = Epoch(p, epoch + i, chunks.chunk(i)).run(is_intact);
    }
    // From here on this call reads and writes nothing that a next one does.
    let_next_kernel_start<kUsePdl>();
    const bool has_failed = __syncthreads_or(!is_done) != 0;  // and all have read the epoch
    if (threadIdx.x == 0 && !has_failed) control->epochs[blockIdx.x] = epoch + chunks.num;
  }

 private:
  using Vector = Words<16>;

  // Of one block, by one of its threads: the vectors `threadIdx.x + k * blockDim.x`.
  struct Epoch {
    const Params& p;
    const u32 epoch;
    const PeerSpan span;  // of vectors of each part

    __device__ Epoch(const Params& p, u32 epoch, PeerSpan span) : p(p), epoch(epoch), span(span) {}

    // False where other ranks did not come in time, or the workspace is broken: then nothing is
    // sent.
    __device__ bool run(bool is_intact) const {
      if constexpr (kWay == kMeet) __threadfence_system();  // what earlier kernels wrote, too
      if (!send(is_intact)) return false;
      if (!add_up()) return false;
      if constexpr (kWay == kMeet) __threadfence_system();  // of what later ones read
      return kWay != kTwoShot || gather();
    }

   private:
    __device__ u32 step() const { return kInFlight * blockDim.x; }

    // Values go to whoever sums them: in one shot all to all, else to each rank its part.
    __device__ bool send(bool is_intact) const {
      constexpr int kDistinct = kToAll ? 1 : kRanks - 1;
      const i64 at = p.slots.at(0, epoch, blockIdx.x, p.rank);
      for (u32 first = threadIdx.x; first < span.count; first += step()) {
        Vector vectors[kInFlight][kDistinct];
        load_all<kDistinct>(vectors, first, [&](int k) -> u32 { return kToAll ? 0 : other(k); });
        // Behind the loads, which are under way together with those of the epoch.
        if (!is_intact) return false;
#pragma unroll
        for (int f = 0; f < kInFlight; ++f) {
          const u32 i = first + f * blockDim.x;
#pragma unroll
          for (int k = 0; k < kRanks - 1; ++k) {
            const u32 to = other(k);
            if (!has(kToAll ? 0 : to, i)) continue;
            store_fresh(slot(to, at) + i, as_sent(vectors[f][kToAll ? 0 : k]).vec);
          }
        }
      }
      return true;
    }

    // This rank's part, or in one shot all. The sums go to `out`, and in two shots to all others.
    __device__ bool add_up() const {
      const u32 part = kToAll ? 0 : p.rank;
      uint4* const slots = slot(p.rank, p.slots.at(0, epoch, blockIdx.x, 0));
      const i64 at = p.slots.at(1, epoch, blockIdx.x, p.rank);
      const auto is_wanted = [&](u32 i, u32 w) { return w != p.rank && has(part, i); };
      for (u32 first = threadIdx.x; has(part, first); first += step()) {
        Vector own[kInFlight][1];
        load_all<1>(own, first, [&](int) -> u32 { return part; });
        Vector vectors[kInFlight][kRanks];
        if (!receive(slots, first, is_wanted, vectors)) return false;
        if (kWay == kMeet) continue;
#pragma unroll
        for (int f = 0; f < kInFlight; ++f) {
          const u32 i = first + f * blockDim.x;
          if (!has(part, i)) continue;
          const Vector sum = sum_of(as_sent(own[f][0]), vectors[f]);
          if (kWay == kTwoShot) {
#pragma unroll
            for (int k = 0; k < kRanks - 1; ++k) store_fresh(slot(other(k), at) + i, sum.vec);
          }
          store(kWay == kScatter ? 0 : p.part_begin(part), part, i, sum);
        }
      }
      return true;
    }

    // The sums of the other parts.
    __device__ bool gather() const {
      uint4* const slots = slot(p.rank, p.slots.at(1, epoch, blockIdx.x, 0));
      const auto is_wanted = [&](u32 i, u32 w) { return w != p.rank && has(w, i); };
      for (u32 first = threadIdx.x; first < span.count; first += step()) {
        Vector vectors[kInFlight][kRanks];
        if (!receive(slots, first, is_wanted, vectors)) return false;
        each(first, is_wanted,
             [&](int f, u32 w, u32 i) { store(p.part_begin(w), w, i, vectors[f][w]); });
      }
      return true;
    }

    // Waits for the vectors of other ranks, all of which are asked for together, and makes their
    // places unwritten again. False where they do not come.
    template <class IsWanted>
    __device__ bool receive(uint4* slots, u32 first, const IsWanted& is_wanted,
                            Vector (&vectors)[kInFlight][kRanks]) const {
      u64 since = 0;
      for (u32 looks = 1;; ++looks) {
        each(first, is_wanted, [&](int f, u32 w, u32 i) {
          vectors[f][w].vec = load_fresh(slots + w * p.slots.vecs + i);
        });
        u32 missing = 0;
        each(first, is_wanted, [&](int f, u32 w, u32) {
          if (is_unwritten(vectors[f][w])) missing |= 1u << w;
        });
        if (missing == 0) break;
        if (looks % kLooksOfClock == 0 && gives_up(since, missing)) return false;
      }
      each(first, is_wanted, [&](int, u32 w, u32 i) {
        store_fresh(slots + w * p.slots.vecs + i,
                    make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten));
      });
      return true;
    }
    template <class IsWanted, class Use>
    __device__ void each(u32 first, const IsWanted& is_wanted, const Use& use) const {
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const u32 i = first + f * blockDim.x;
#pragma unroll
        for (u32 w = 0; w < kNumRanks; ++w) {
          if (is_wanted(i, w)) use(f, w, i);
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

    // The other ranks, each beginning with the one behind it, so that not all write to one.
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

    // Of the parts `part_of(k)`. Whole vectors are loaded together, without a branch that would
    // have one wait for the other; behind the end there are zeros.
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

    // In the order of ranks, rounded once. It may be sent.
    __device__ Vector sum_of(const Vector& own, const Vector (&vectors)[kRanks]) const {
      const auto of = [&](u32 w) { return w == p.rank ? own : vectors[w]; };
      float sums[kItems];
      floats_of<kType, kItems>(of(0), sums);
#pragma unroll
      for (u32 w = 1; w < kNumRanks; ++w) {
        float values[kItems];
        floats_of<kType, kItems>(of(w), values);
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

  // By items, in loops that need no registers: there is one such vector in a part.
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
