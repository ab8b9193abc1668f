// Calls of a PeerReducer: any tensors of all ranks, and what their sums are.
#pragma once

#include <memory>

#include "buffers.h"
#include "comm/peer_reduce.h"

namespace emulate {

using jitkern::kUnwritten;
using jitkern::PeerReduceParams;

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
    std::vector<u32> items;             // as bits
  };

  // Of up to three rounds of slots, or some rounds that hold `vecs`.
  PeerSum(const std::vector<PeerKernel>& kernels, u32 num_ranks, u32 vecs, Random& random)
      : num_ranks_(num_ranks) {
    std::vector<PeerKernel> own;
    const bool is_sum = random.below(6) != 0;  // a barrier is short, and sums are what can go wrong
    for (const PeerKernel& one : kernels) {
      const bool is_wanted = !is_sum || one.way != jitkern::kMeet;
      if (one.num_ranks == static_cast<int>(num_ranks) && is_wanted) own.push_back(one);
    }
    const PeerKernel& like = own[static_cast<size_t>(random.below(i64(own.size())))];
    type_ = like.type, way_ = like.way;
    item_bytes_ = jitkern::item_bytes_of(type_);
    const i64 of_vec = 16 / item_bytes_;
    num_items_ =
        random.pick({i64(1), random.below(9) + 1, of_vec * random.below(vecs + 1) + 1,
                     of_vec * (1 + random.below(vecs)), random.below(3 * of_vec * vecs) + 1,
                     random.below(30 * of_vec) == 0 ? i64(4000) : i64(of_vec)});
    if (way_ == jitkern::kTwoShot && num_items_ * item_bytes_ <= 16 * (num_ranks - 1)) {
      num_items_ += of_vec * num_ranks;
    }
    if (way_ == jitkern::kScatter) num_items_ *= num_ranks;  // of x
    if (way_ == jitkern::kMeet) num_items_ = of_vec;         // which nobody reads
    for (u32 r = 0; r < num_ranks; ++r) ranks.push_back(any_rank(r, kernels, random));
    expect();
  }

  // As the blocks of the call count.
  u32 epochs_of(u32 block) const {
    if (block >= num_blocks) return 0;
    const PeerReduceParams& p = ranks[0].params;
    return (p.blocks.share(block).count + p.slots.vecs - 1) / p.slots.vecs;
  }

  bool is_one_shot() const { return way_ == jitkern::kOneShot || is_barrier(); }
  bool is_barrier() const { return way_ == jitkern::kMeet; }
  bool is_two_shot() const { return way_ == jitkern::kTwoShot; }

  // What rank `r` should have by now.
  void check(u32 r, bool is_done) {
    Rank& rank = ranks[r];
    RowBuffer& out = rank.out == nullptr ? *rank.x : *rank.out;
    if (is_done && !is_barrier()) {
      const i64 begin = way_ == jitkern::kScatter ? num_items_ / num_ranks_ * r : 0;
      const i64 count = way_ == jitkern::kScatter ? num_items_ / num_ranks_ : num_items_;
      char* const to = out.expected(0) + (rank.out == nullptr ? begin * item_bytes_ : 0);
      for (i64 i = 0; i < count; ++i) {
        std::memcpy(to + i * item_bytes_, &sums_[static_cast<size_t>(begin + i)],
                    static_cast<size_t>(item_bytes_));
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
      const bool is_aligned = way_ != jitkern::kScatter ||
                              num_items_ / num_ranks_ * item_bytes_ % one.access_bytes == 0;
      if (is_like && is_aligned) fitting.push_back(one);
    }
    if (fitting.empty()) fail("no such kernel");
    const PeerKernel& kernel = fitting[static_cast<size_t>(random.below(i64(fitting.size())))];
    Rank rank;
    rank.run = kernel.run;
    const i64 bytes = num_items_ * item_bytes_;
    const bool is_scatter = way_ == jitkern::kScatter;
    const auto buffer = [&](const char* name, i64 num_bytes) {
      const i64 offset = kernel.access_bytes * random.below(128 / kernel.access_bytes);
      return std::make_unique<RowBuffer>(name, 1, num_bytes, num_bytes, offset, random);
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

  // As peer_reduce.cc does.
  void give_parts(PeerReduceParams& p, i64 bytes) const {
    const u32 vecs = static_cast<u32>((bytes + 15) / 16);
    p.tail_bytes = static_cast<u32>(bytes % 16);
    p.part_bytes = bytes;
    p.num_vecs = vecs;
    if (way_ == jitkern::kTwoShot) {
      p.part_bytes = vecs / num_ranks_ * 16;
      p.longer_parts = vecs % num_ranks_;
      p.num_vecs = (vecs + num_ranks_ - 1) / num_ranks_;
    }
    if (way_ == jitkern::kScatter) {
      p.part_bytes = bytes / num_ranks_;
      p.tail_bytes = static_cast<u32>(p.part_bytes % 16);
      p.num_vecs = static_cast<u32>((p.part_bytes + 15) / 16);
    }
  }

  // Numbers of all kinds, and the bits that slots hold where nothing is written.
  void fill(Rank& rank, Random& random) const {
    const u32 all = item_bytes_ == 4 ? ~0u : 0xffff;
    const u32 one = type_ == jitkern::kFloat32   ? 0x3f800000
                    : type_ == jitkern::kFloat16 ? 0x3c00
                                                 : 0x3f80;
    const i64 kind = random.below(4);
    for (i64 i = 0; i < num_items_; ++i) {
      const u32 any = static_cast<u32>(random.bits()) & all;
      u32 bits = kind == 0   ? any
                 : kind == 1 ? (one & 0xfffff000) + any % (one / 2)
                             : random.pick({any, all, all, all - 1, 0u, all / 2 + 1, 1u, one});
      rank.items.push_back(bits);
      std::memcpy(rank.x->row(0) + i * item_bytes_, &bits, static_cast<size_t>(item_bytes_));
      std::memcpy(rank.x->expected(0) + i * item_bytes_, &bits, static_cast<size_t>(item_bytes_));
    }
  }

  template <int kType>
  u32 sum(size_t i) const {
    const auto value = [&](const Rank& rank) {
      return jitkern::float_of<kType>(static_cast<jitkern::Bits<kType>>(rank.items[i]));
    };
    float sum = value(ranks[0]);
    for (u32 r = 1; r < num_ranks_; ++r) sum += value(ranks[r]);
    return jitkern::bits_as<kType>(sum != sum ? jitkern::float_of_bits(0x7fffffff) : sum);
  }
  void expect() {
    for (size_t i = 0; i < static_cast<size_t>(num_items_); ++i) {
      sums_.push_back(type_ == jitkern::kFloat32   ? sum<jitkern::kFloat32>(i)
                      : type_ == jitkern::kFloat16 ? sum<jitkern::kFloat16>(i)
                                                   : sum<jitkern::kBFloat16>(i));
    }
  }

  const u32 num_ranks_;
  int type_ = 0, way_ = 0;
  i64 item_bytes_ = 0, num_items_ = 0;
  std::vector<u32> sums_;
};

}  // namespace emulate
