#include "comm/peer_reduce_by_cpu.h"

#include <sched.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace jitkern {

namespace {

using Clock = std::chrono::steady_clock;
struct Vector {
  u32 words[4];
};

// Stores are releases and loads acquires: who sees a value of epoch e + 1 sees behind it what its
// writer made unwritten in epoch e.
void send_word(u32* to, u32 word) { __atomic_store_n(to, word, __ATOMIC_RELEASE); }
u32 word_at(const u32* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }

// Looks at the clock now and then.
class Patience {
 public:
  Patience(u64 deadline_ns, bool (*is_interrupted)())
      : deadline_ns_(deadline_ns), is_interrupted_(is_interrupted) {}

  // A new wait.
  void begin() {
    looks_ = 0;
    result = {PeerResult::kDone, 0};
  }
  // Between two looks. False when there have been enough.
  bool rest() {
    ++looks_;
    if (looks_ < kSpins) return true;
    sched_yield();
    if (looks_ == kSpins) since_ = Clock::now();
    if (looks_ % kLooksOfClock != 0) return true;
    if (is_interrupted_()) {
      result.kind = PeerResult::kInterrupted;
      return false;
    }
    if (deadline_ns_ == 0 || Clock::now() - since_ < std::chrono::nanoseconds(deadline_ns_)) {
      return true;
    }
    result.kind = PeerResult::kLate;
    return false;
  }

  PeerResult result{PeerResult::kDone, 0};

 private:
  static constexpr u64 kSpins = 1024, kLooksOfClock = 256;
  const u64 deadline_ns_;
  bool (*const is_interrupted_)();
  u64 looks_ = 0;
  Clock::time_point since_;
};

template <int kType>
class Reduction {
 public:
  Reduction(const PeerReduceParams& p, PeerWay way, u32 num_blocks, Patience& patience)
      : p_(p), way_(way), num_ranks_(p.slots.num_ranks), patience_(patience) {
    for (u32 block = 0; block < num_blocks; ++block) {
      blocks_.push_back({PeerChunks(p.blocks.share(block), p.slots.vecs),
                         __atomic_load_n(&p.control()->epochs[block], __ATOMIC_RELAXED)});
    }
  }

  // Blocks take turns, each step of all of them in front of the next, so that nobody waits for what
  // this thread sends later.
  bool run() {
    for (u32 i = 0; i < blocks_[0].chunks.num; ++i) {
      for (u32 b = 0; b < blocks_.size(); ++b) send(Epoch(*this, b, i));
      for (u32 b = 0; b < blocks_.size(); ++b) {
        if (!add_up(Epoch(*this, b, i))) return false;
      }
      for (u32 b = 0; b < blocks_.size() && way_ == kTwoShot; ++b) {
        if (!gather(Epoch(*this, b, i))) return false;
      }
    }
    for (u32 b = 0; b < blocks_.size(); ++b) {
      __atomic_store_n(&p_.control()->epochs[b], blocks_[b].epoch + blocks_[b].chunks.num,
                       __ATOMIC_RELAXED);
    }
    return true;
  }

 private:
  static constexpr int kItems = 16 / item_bytes_of(kType);

  struct Block {
    PeerChunks chunks;
    u32 epoch;
  };

  // One of a block; empty behind its last, which is sooner than that of the first block, or as
  // late.
  struct Epoch {
    const PeerReduceParams& p;
    u32 block, number;
    PeerSpan span;

    Epoch(const Reduction& all, u32 block, u32 i)
        : p(all.p_), block(block), number(all.blocks_[block].epoch + i), span{0, 0} {
      if (i < all.blocks_[block].chunks.num) span = all.blocks_[block].chunks.chunk(i);
    }
    u32* slot(u32 rank, int stage, u32 writer, u32 i) const {
      char* const begin = p.workspaces[rank] + p.slots.at(stage, number, block, writer);
      return reinterpret_cast<u32*>(begin + i * kPeerVecBytes);
    }
  };

  bool is_to_all() const { return way_ == kOneShot || way_ == kMeet; }
  bool has(const Epoch& e, u32 part, u32 i) const {
    return e.span.begin + i < p_.num_vecs_of(way_, part);
  }
  i64 offset(const Epoch& e, u32 i) const { return (e.span.begin + i) * kPeerVecBytes; }
  size_t num_bytes(const Epoch& e, u32 part, u32 i) const {
    return e.span.begin + i < p_.num_whole_of(way_, part) ? 16 : p_.tail_bytes;
  }
  Vector load(const Epoch& e, u32 part, u32 i) const {
    Vector vector{};
    if (way_ == kMeet) return vector;
    std::memcpy(vector.words, p_.x + p_.part_begin(part) + offset(e, i), num_bytes(e, part, i));
    for (u32& word : vector.words) word = sent_word(word);
    return vector;
  }
  void store(const Epoch& e, i64 part_at, u32 part, u32 i, const Vector& vector) const {
    std::memcpy(p_.out + part_at + offset(e, i), vector.words, num_bytes(e, part, i));
  }

  void send(const Epoch& e) const {
    for (u32 k = 1; k < num_ranks_; ++k) {
      const u32 to = (p_.rank + k) % num_ranks_;
      const u32 part = is_to_all() ? 0 : to;
      for (u32 i = 0; i < e.span.count && has(e, part, i); ++i) {
        put(e.slot(to, 0, p_.rank, i), load(e, part, i));
      }
    }
  }

  bool add_up(const Epoch& e) const {
    const u32 part = is_to_all() ? 0 : p_.rank;
    for (u32 i = 0; i < e.span.count && has(e, part, i); ++i) {
      Vector sum{};
      float sums[kItems];
      for (u32 w = 0; w < num_ranks_; ++w) {
        Vector vector;
        if (w == p_.rank) {
          vector = load(e, part, i);
        } else if (!receive(e, 0, w, i, vector)) {
          return false;
        }
        float values[kItems];
        floats_of(vector, values);
        for (int k = 0; k < kItems; ++k)
          sums[k] = w == 0 ? values[k] : peer_sum(sums[k], values[k]);
      }
      if (way_ == kMeet) continue;
      round(sums, sum);
      if (way_ == kTwoShot) {
        for (u32 k = 1; k < num_ranks_; ++k) {
          put(e.slot((p_.rank + k) % num_ranks_, 1, p_.rank, i), sum);
        }
      }
      store(e, way_ == kScatter ? 0 : p_.part_begin(part), part, i, sum);
    }
    return true;
  }

  bool gather(const Epoch& e) const {
    for (u32 w = 0; w < num_ranks_; ++w) {
      for (u32 i = 0; w != p_.rank && i < e.span.count && has(e, w, i); ++i) {
        Vector vector;
        if (!receive(e, 1, w, i, vector)) return false;
        store(e, p_.part_begin(w), w, i, vector);
      }
    }
    return true;
  }

  static void put(u32* to, const Vector& vector) {
    for (int k = 0; k < 4; ++k) send_word(to + k, vector.words[k]);
  }

  // Waits for it, and makes its place unwritten.
  bool receive(const Epoch& e, int stage, u32 writer, u32 i, Vector& vector) const {
    u32* const from = e.slot(p_.rank, stage, writer, i);
    patience_.begin();
    for (int k = 0; k < 4; ++k) {
      while ((vector.words[k] = word_at(from + k)) == kUnwritten) {
        if (patience_.rest()) continue;
        patience_.result.missing = missing(e, stage, writer, i);
        if (patience_.result.missing >> writer & 1) return false;
        if (patience_.result.kind == PeerResult::kInterrupted) return false;
        patience_.begin();  // it has come between the last look and the end of patience
      }
    }
    for (int k = 0; k < 4; ++k) __atomic_store_n(from + k, kUnwritten, __ATOMIC_RELAXED);
    return true;
  }

  // The ranks of which something is missing here, from the writer that is waited for on: what those
  // in front of it have sent was received, and its place made unwritten.
  u32 missing(const Epoch& e, int stage, u32 writer, u32 i) const {
    u32 ranks = 0;
    for (u32 w = writer; w < num_ranks_; ++w) {
      const u32 part = stage == 0 ? (is_to_all() ? 0 : p_.rank) : w;
      if (w == p_.rank || !has(e, part, i)) continue;
      const u32* const from = e.slot(p_.rank, stage, w, i);
      for (int k = 0; k < 4; ++k) ranks |= word_at(from + k) == kUnwritten ? 1u << w : 0;
    }
    return ranks;
  }

  static void floats_of(const Vector& vector, float* values) {
    Bits<kType> items[kItems];
    std::memcpy(items, vector.words, 16);
    for (int k = 0; k < kItems; ++k) values[k] = float_of<kType>(items[k]);
  }
  static void round(const float* sums, Vector& vector) {
    Bits<kType> items[kItems];
    for (int k = 0; k < kItems; ++k) items[k] = bits_as<kType>(sums[k]);
    std::memcpy(vector.words, items, 16);
    for (u32& word : vector.words) word = sent_word(word);
  }

  const PeerReduceParams& p_;
  const PeerWay way_;
  const u32 num_ranks_;
  Patience& patience_;
  std::vector<Block> blocks_;
};

}  // namespace

PeerResult peer_reduce_by_cpu(const PeerReduceParams& params, PeerWay way, int type, u32 num_blocks,
                              bool (*is_interrupted)()) {
  u32* const intact = &params.control()->intact;
  if (const u32 word = __atomic_load_n(intact, __ATOMIC_RELAXED); word != kUnwritten) {
    return {PeerResult::kBroken, word};
  }
  Patience patience(params.deadline_ns, is_interrupted);
  const auto run = [&](auto reduction) { return reduction.run(); };
  const bool is_done =
      type == kFloat32   ? run(Reduction<kFloat32>(params, way, num_blocks, patience))
      : type == kFloat16 ? run(Reduction<kFloat16>(params, way, num_blocks, patience))
                         : run(Reduction<kBFloat16>(params, way, num_blocks, patience));
  PeerResult result = patience.result;
  if (is_done) return result;
  __atomic_store_n(intact, result.missing, __ATOMIC_RELAXED);
  if (result.kind == PeerResult::kLate) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(params.grace_ns()));
    result.missing = params.blamed(result.missing, word_at);
  }
  return result;
}

}  // namespace jitkern
