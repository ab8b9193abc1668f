// all_reduce and reduce_scatter of 2 to 8 ranks, all blocks of all of them at once: calls of many
// sizes behind each other, kernels of a rank that overlap as by programmatic dependent launch, and
// stores that are seen word by word, late and in any order.
#include "comm/peer_reduce.cu"

#include <sanitizer/asan_interface.h>

#include <memory>

#include "sweep.h"

namespace emulate {

constexpr FaultSite kSite{9};

struct PeerKernel {
  int type, num_ranks, access_bytes, way;
  void (*run)(const PeerReduceParams&);
};

// One call, of all ranks: way and type are the same, alignment and in place or not are each one's
// own.
class PeerSum {
 public:
  struct Rank {
    PeerReduceParams params{};
    void (*run)(const PeerReduceParams&);
    std::unique_ptr<RowBuffer> x, out;  // no `out`: in place
    std::vector<u32> items;             // their bits
  };

  // Up to three rounds of slots; a round has `vecs` vectors.
  PeerSum(const std::vector<PeerKernel>& kernels, u32 num_ranks, u32 vecs, Random& random)
      : num_ranks_(num_ranks) {
    std::vector<PeerKernel> own;
    const bool is_sum = random.below(6) != 0;  // a barrier is short, and sums are what can go wrong
    for (const PeerKernel& one : kernels) {
      const bool is_wanted = !is_sum || one.way != kMeet;
      if (one.num_ranks == static_cast<int>(num_ranks) && is_wanted) own.push_back(one);
    }
    const PeerKernel& like = own[random.below(i64(own.size()))];
    type_ = like.type, way_ = like.way;
    item_bytes_ = item_bytes_of(type_);
    const i64 of_vec = 16 / item_bytes_;
    num_items_ =
        random.pick({i64(1), random.below(9) + 1, of_vec * random.below(vecs + 1) + 1,
                     of_vec * (1 + random.below(vecs)), random.below(3 * of_vec * vecs) + 1,
                     random.below(30 * of_vec) == 0 ? i64(4000) : i64(of_vec)});
    if (way_ == kTwoShot && num_items_ * item_bytes_ <= 16 * (num_ranks - 1)) {
      num_items_ += of_vec * num_ranks;
    }
    if (way_ == kScatter) num_items_ *= num_ranks;  // the items of x
    if (way_ == kMeet) num_items_ = of_vec;         // nobody reads them
    for (u32 r = 0; r < num_ranks; ++r) ranks.push_back(any_rank(r, kernels, random));
    expect();
  }

  // The epochs that a block of the call counts.
  u32 epochs_of(u32 block) const {
    if (block >= num_blocks) return 0;
    const PeerReduceParams& p = ranks[0].params;
    return (p.blocks.share(block).count + p.slots.vecs - 1) / p.slots.vecs;
  }

  bool is_barrier() const { return way_ == kMeet; }

  // What rank `r` should have by now.
  void check(u32 r, bool is_done) {
    Rank& rank = ranks[r];
    RowBuffer& out = rank.out == nullptr ? *rank.x : *rank.out;
    if (is_done && !is_barrier()) {
      const i64 begin = way_ == kScatter ? num_items_ / num_ranks_ * r : 0;
      const i64 count = way_ == kScatter ? num_items_ / num_ranks_ : num_items_;
      char* const to = out.expected(0) + (rank.out == nullptr ? begin * item_bytes_ : 0);
      for (i64 i = 0; i < count; ++i) {
        std::memcpy(to + i * item_bytes_, &sums_[begin + i], item_bytes_);
      }
    }
    rank.x->check();
    if (rank.out != nullptr) rank.out->check();
  }

  std::vector<Rank> ranks;
  u32 num_blocks = 0;

 private:
  Rank any_rank(u32 r, const std::vector<PeerKernel>& kernels, Random& random) {
    std::vector<PeerKernel> fitting;
    for (const PeerKernel& one : kernels) {
      const bool is_like =
          one.num_ranks == static_cast<int>(num_ranks_) && one.type == type_ && one.way == way_;
      const bool is_aligned =
          way_ != kScatter || num_items_ / num_ranks_ * item_bytes_ % one.access_bytes == 0;
      if (is_like && is_aligned) fitting.push_back(one);
    }
    if (fitting.empty()) fail("no such kernel");
    const PeerKernel& kernel = fitting[random.below(i64(fitting.size()))];
    Rank rank;
    rank.run = kernel.run;
    const i64 bytes = num_items_ * item_bytes_;
    const bool is_scatter = way_ == kScatter;
    const auto buffer = [&](const char* name, i64 num_bytes) {
      const i64 offset = kernel.access_bytes * random.below(128 / kernel.access_bytes);
      return std::make_unique<RowBuffer>(name, 1, num_bytes, Placement{offset, num_bytes}, random);
    };
    rank.x = buffer("x", bytes);
    if (random.below(2) == 0) {
      rank.out = buffer("out", is_scatter ? bytes / num_ranks_ : bytes);
    }
    fill(rank, random);
    PeerReduceParams& p = rank.params;
    p.x = rank.x->row(0);
    p.out = rank.out != nullptr ? rank.out->row(0)
            : is_scatter        ? rank.x->row(0) + bytes / num_ranks_ * r
                                : rank.x->row(0);
    give_parts(p, bytes);
    return rank;
  }

  // The same as in peer_reduce.cc.
  void give_parts(PeerReduceParams& p, i64 bytes) const {
    const u32 vecs = static_cast<u32>((bytes + 15) / 16);
    p.tail_bytes = static_cast<u32>(bytes % 16);
    p.part_bytes = bytes;
    p.num_vecs = vecs;
    if (way_ == kTwoShot) {
      p.part_bytes = vecs / num_ranks_ * 16;
      p.longer_parts = vecs % num_ranks_;
      p.num_vecs = (vecs + num_ranks_ - 1) / num_ranks_;
    }
    if (way_ == kScatter) {
      p.part_bytes = bytes / num_ranks_;
      p.tail_bytes = static_cast<u32>(p.part_bytes % 16);
      p.num_vecs = static_cast<u32>((p.part_bytes + 15) / 16);
    }
  }

  // Numbers of all kinds, and the bits that slots hold where nothing is written.
  void fill(Rank& rank, Random& random) const {
    const u32 all = item_bytes_ == 4 ? ~0u : 0xffff;
    const u32 one = type_ == kFloat32 ? 0x3f800000 : type_ == kFloat16 ? 0x3c00 : 0x3f80;
    const i64 kind = random.below(4);
    for (i64 i = 0; i < num_items_; ++i) {
      const u32 any = static_cast<u32>(random.bits()) & all;
      u32 bits = kind == 0   ? any
                 : kind == 1 ? (one & 0xfffff000) + any % (one / 2)
                             : random.pick({any, all, all, all - 1, 0u, all / 2 + 1, 1u, one});
      rank.items.push_back(bits);
      std::memcpy(rank.x->row(0) + i * item_bytes_, &bits, item_bytes_);
      std::memcpy(rank.x->expected(0) + i * item_bytes_, &bits, item_bytes_);
    }
  }

  template <int kType>
  u32 sum(size_t i) const {
    const auto value = [&](const Rank& rank) {
      return float_of<kType>(static_cast<Bits<kType>>(rank.items[i]));
    };
    float sum = value(ranks[0]);
    for (u32 r = 1; r < num_ranks_; ++r) sum += value(ranks[r]);
    return bits_as<kType>(sum != sum ? float_of_bits(0x7fffffff) : sum);
  }
  void expect() {
    for (size_t i = 0; i < static_cast<size_t>(num_items_); ++i) {
      sums_.push_back(type_ == kFloat32   ? sum<kFloat32>(i)
                      : type_ == kFloat16 ? sum<kFloat16>(i)
                                          : sum<kBFloat16>(i));
    }
  }

  const u32 num_ranks_;
  int type_ = 0, way_ = 0;
  i64 item_bytes_ = 0, num_items_ = 0;
  std::vector<u32> sums_;
};

template <int kType, int kRanks, int kAccessBytes, int kWay, int kInFlight>
struct Kernel {
  using Reduce = PeerReduce<kType, kRanks, kAccessBytes, kWay, 512, 1, true, kInFlight>;
  static PeerKernel described() { return {kType, kRanks, kAccessBytes, kWay, Reduce::run}; }
};

template <class... Kernels>
std::vector<PeerKernel> list_of() {
  return {Kernels::described()...};
}

// Ranks, each of which has its calls run by two sets of blocks in turn, so that two of its kernels
// can be there at once.
class Round {
 public:
  Round(const std::vector<PeerKernel>& kernels, u32 num_ranks, Random& random)
      : random_(random),
        num_ranks_(num_ranks),
        num_threads_(random.pick({1u, 3u, 4u, 4u})),
        num_blocks_(random.pick({1u, 2u, 3u})),
        slots_{num_ranks, random.pick({1u, 2u, 3u, 5u})},
        calls_(any_calls(kernels)),
        at_(2 * num_ranks * num_blocks_ * num_threads_, -1),
        slow_(at_.size(), 0),
        is_fenced_(at_.size(), 0),
        kernels_(num_ranks, std::vector<Running>(calls_.size())) {
    first_epoch_ = random.pick({~0u, 0u, 7u, ~0u - 3});
    for (u32 r = 0; r < num_ranks_; ++r) {
      workspaces_.emplace_back(slots_.workspace_bytes() / 4, ~0u);
      for (u32& epoch : control(r).epochs) epoch = first_epoch_;
      failures_.emplace_back(0);
      faults_.emplace_back(random.pick({0u, 0u, 2u}));
    }
    for (u32 k = 0; k < calls_.size(); ++k) give_params(k);
  }

  // From call `from` on rank `missing` does not come, if that is a rank.
  void run(i64 from, u32 missing) {
    missing_from_ = from;
    missing_ = missing;
    on_fresh_load = [this] { look_on(); };
    on_system_fence = [this] {
      is_fenced_[number()] = 1;
      // What other threads of the block did in front of a barrier as well.
      const u32 block = number() / num_threads_;
      flush([&](const Pending& one) { return one.owner / num_threads_ == block; });
    };
    store_vector = [this](uint4* to, const uint4& value) { store(to, value); };
    on_wait_for_kernels = [this] { wait_for_kernel(); };
    on_let_kernel_start = [this] { ++here().num_let; };
    launch_groups({num_blocks_, 2 * num_ranks_}, {num_threads_}, num_blocks_ * 2 * num_ranks_,
                  any_order(random_), [this] { thread(); });
    on_fresh_load = nullptr, on_system_fence = nullptr, store_vector = nullptr;
    on_wait_for_kernels = nullptr, on_let_kernel_start = nullptr;
    check_end();
  }
  u32 num_calls() const { return static_cast<u32>(calls_.size()); }

 private:
  struct Pending {
    u32* at;
    u32 value;
    u32 owner;
  };
  static constexpr u32 kAllOnes[4] = {~0u, ~0u, ~0u, ~0u};
  // One call of one rank.
  struct Running {
    u32 num_let = 0;
    u32 num_ended = 0;
    i64 num_stored = 0;
    bool is_over = false;
    u64 begins_at = 0;
  };

  std::vector<PeerSum> any_calls(const std::vector<PeerKernel>& kernels) {
    std::vector<PeerSum> calls;
    const i64 num = random_.pick({1, 2, 5, 12});
    for (i64 k = 0; k < num; ++k) {
      calls.emplace_back(kernels, num_ranks_, num_blocks_ * slots_.vecs, random_);
    }
    return calls;
  }
  PeerControl& control(u32 rank) {
    return *reinterpret_cast<PeerControl*>(workspaces_[rank].data());
  }
  void give_params(u32 k) {
    PeerSum& call = calls_[k];
    const u32 blocks = static_cast<u32>(1 + random_.below(num_blocks_));
    for (u32 r = 0; r < num_ranks_; ++r) {
      PeerReduceParams& p = call.ranks[r].params;
      for (u32 w = 0; w < num_ranks_; ++w) {
        p.workspaces[w] = reinterpret_cast<char*>(workspaces_[w].data());
      }
      p.slots = slots_;
      call.num_blocks = std::min(blocks, p.num_vecs);
      p.blocks = PeerShares::of(p.num_vecs, call.num_blocks);
      p.rank = r;
      p.number = k + 1;
      p.site = kSite;
      p.failure = failures_[r].record();
      p.fault = faults_[r].record();
      kernels_[r][k].begins_at = static_cast<u64>(random_.pick({i64(0), random_.below(300)}));
    }
  }

  u32 rank() const { return blockIdx.y / 2; }
  u32 number() const {
    return (blockIdx.y * num_blocks_ + blockIdx.x) * num_threads_ + threadIdx.x;
  }
  Running& here() { return kernels_[rank()][at_[number()]]; }
  void rest() {
    if (++rests_ > 50'000'000) fail("it never ends");
    let_others_run();
  }

  void thread() {
    const u32 own = number(), r = rank();
    for (u32 k = blockIdx.y % 2; k < calls_.size(); k += 2) {
      PeerSum& call = calls_[k];
      if (blockIdx.x >= call.num_blocks) continue;
      if (r == missing_ && k >= missing_from_) continue;
      at_[own] = k;
      is_fenced_[own] = 0;
      // Little where the clock is looked at, which goes on by the looks of all.
      const bool all_come = missing_ == num_ranks_ || k < missing_from_;
      slow_[own] = all_come ? random_.pick({1, 1, 1, 2, 5, 40}) : random_.pick({1, 5});
      for (u64 i = 0; i < kernels_[r][k].begins_at; ++i) rest();
      while (!may_start(k)) rest();
      PeerReduceParams params = call.ranks[r].params;  // one for each thread, as registers are
      params.deadline_ns = missing_ < num_ranks_ ? 32 * kNanosecondsEach * at_.size() : 0;
      call.ranks[r].run(params);
      if (call.is_barrier() && all_come && !is_fenced_[own]) {
        fail("what is behind a barrier may be read in front of it");
      }
      Running& running = kernels_[r][k];
      if (++running.num_ended == call.num_blocks * num_threads_) end(r, k);
    }
  }
  // All threads of the kernel in front let it.
  bool may_start(u32 k) {
    if (k == 0) return true;
    const Running& before = kernels_[rank()][k - 1];
    return before.is_over || before.num_let == calls_[k - 1].num_blocks * num_threads_;
  }
  void wait_for_kernel() {
    const i64 k = at_[number()];
    while (k > 0 && !kernels_[rank()][k - 1].is_over) rest();
  }
  void end(u32 r, u32 k) {
    const u32 set = (2 * r + k % 2) * num_blocks_ * num_threads_;
    flush([&](const Pending& one) {
      return one.owner >= set && one.owner < set + num_blocks_ * num_threads_;
    });
    kernels_[r][k].is_over = true;
    const i64 fails_at = missing_ < num_ranks_ ? missing_from_ : num_calls();
    calls_[k].check(r, k < fails_at);
    if (k > fails_at && kernels_[r][k].num_stored > 0) {
      fail("a broken workspace is used");
    }
  }

  void look_on() {
    is_fenced_[number()] = 0;
    for (i64 count = random_.below(4); count > 0 && !pending_.empty(); --count) {
      const size_t i = static_cast<size_t>(random_.below(static_cast<i64>(pending_.size())));
      land(pending_[i]);
      pending_[i] = pending_.back();
      pending_.pop_back();
    }
    for (i64 count = random_.below(2) * slow_[number()]; count > 0; --count) rest();
  }
  void store(uint4* to, const uint4& value) {
    ++here().num_stored;
    const PeerSum& call = calls_[at_[number()]];
    const bool is_sent = std::memcmp(&value, &kAllOnes, sizeof(value)) != 0;
    if (call.is_barrier() && is_sent && !is_fenced_[number()]) fail("a barrier overtakes");
    u32 words[4];
    std::memcpy(words, &value, 16);
    for (int i = 0; i < 4; ++i) {
      u32* const at = reinterpret_cast<u32*>(to) + i;
      // Those of one thread to one place come one after the other.
      flush([&](const Pending& one) { return one.owner == number() && one.at == at; });
      if (__asan_address_is_poisoned(at)) land({at, words[i], 0});  // it reports where
      pending_.push_back({at, words[i], number()});
    }
  }
  template <class Which>
  void flush(const Which& which) {
    for (size_t i = 0; i < pending_.size();) {
      if (!which(pending_[i])) {
        ++i;
        continue;
      }
      land(pending_[i]);
      pending_[i] = pending_.back();
      pending_.pop_back();
    }
  }
  // Every place is written, read, and made unwritten, in turn.
  void land(const Pending& one) {
    const u32 before = *one.at;
    if (one.value != kUnwritten && before != kUnwritten) fail("overwrites what is not read");
    if (one.value == kUnwritten && before == kUnwritten) fail("makes unwritten what is not there");
    *one.at = one.value;
  }

  void check_end() {
    const bool is_broken = missing_ < num_ranks_;
    for (u32 r = 0; r < num_ranks_; ++r) {
      if (is_broken && r != missing_) expect_failure(r);
      failures_[r].check();
      faults_[r].check();
      if (is_broken) continue;
      for (u32 b = 0; b < kMostPeerBlocks; ++b) {
        u32 epoch = first_epoch_;
        for (u32 k = 0; k < num_calls(); ++k) epoch += calls_[k].epochs_of(b);
        if (control(r).epochs[b] != epoch) fail("the epoch of block " + std::to_string(b));
      }
      if (control(r).intact != kUnwritten) fail("broken, though all came");
      const i64 begin = kPeerControlBytes / 4, end = slots_.workspace_bytes() / 4;
      for (i64 i = begin; i < end; ++i) {
        if (workspaces_[r].data()[i] != kUnwritten) fail("leaves something written");
      }
    }
  }
  void expect_failure(u32 r) {
    const i64 mask = 1 << missing_;
    const i64 number = missing_from_ + 1;
    if (control(r).intact == kUnwritten) fail("not broken, though ranks were missing");
    if (failures_[r].record()->state != 2) fail("silent");
    failures_[r].expect(kSite, mask, number, r);
    faults_[r].expect(kSite, mask, number, r);
  }

  Random& random_;
  const u32 num_ranks_, num_threads_, num_blocks_;
  const PeerSlots slots_;
  std::vector<PeerSum> calls_;
  std::vector<i64> at_;  // the call of each fiber
  std::vector<i64> slow_;
  std::vector<char> is_fenced_;  // since it last looked at what others write
  std::vector<std::vector<Running>> kernels_;
  std::vector<AlignedWords> workspaces_;
  std::vector<FaultWord> failures_, faults_;
  std::vector<Pending> pending_;
  u32 first_epoch_ = 0;
  i64 missing_from_ = 0;
  u32 missing_ = 0;
  u64 rests_ = 0;
};

}  // namespace emulate

int main() {
  using namespace emulate;
#ifdef SWEEP_FEW
  const std::vector<PeerKernel> list = list_of<FEW_KERNELS>();
  constexpr int kRounds = 120;
#else
  const std::vector<PeerKernel> list = list_of<ALL_KERNELS>();
  constexpr int kRounds = 60;
#endif
  rounds("peer_reduce", kRounds, [&](Random& random, int) {
    const auto& kernel = list[random.below(static_cast<i64>(list.size()))];
    const u32 num_ranks = static_cast<u32>(kernel.num_ranks);
    Round round(list, num_ranks, random);
    const bool all_come = random.below(4) != 0;
    round.run(random.below(round.num_calls()),
              all_come ? num_ranks : static_cast<u32>(random.below(num_ranks)));
  });
}
