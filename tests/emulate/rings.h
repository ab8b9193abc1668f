// A DescriptorRing in memory, and one who pushes to it a store at a time, while kernels read.
#pragma once

#include <jitkern/both/ring.h>
#include <sanitizer/asan_interface.h>

#include <map>
#include <set>

#include "ops/unpack_ring.h"
#include "sweep.h"

namespace emulate {

// Of exactly the bytes that a ring has. What nobody reads is poisoned.
class RingMemory {
 public:
  RingMemory(unsigned num_slots, unsigned max_descriptors)
      : header(ring_layout(num_slots, max_descriptors)),
        memory(allocate(128, header.num_bytes)),
        base(memory.get()) {
    std::memset(base, 0, header.num_bytes);
    ring_init(base, num_slots, max_descriptors);
  }

  u64* head() const { return at(header.head_at); }
  u64* word(u64 ticket) const { return at(header.word_at(ticket)); }
  u64* done(u64 ticket) const { return at(header.done_at(ticket)); }
  // The eight words of a descriptor: with number 3 and 7, the seals, each of its halves ends.
  u64* words(u64 ticket, u64 descriptor) const {
    return at(header.descriptors_at(ticket) + static_cast<i64>(descriptor * sizeof(Descriptor)));
  }
  u64* at(i64 offset) const { return reinterpret_cast<u64*>(base + offset); }
  i64 offset_of(const u64* word) const { return reinterpret_cast<const char*>(word) - base; }

  // As it is when so many generations are over, of whose last one `count` descriptors are left.
  void grow_old(u64 generations, unsigned count) {
    *head() = generations * header.num_slots;
    for (u64 slot = 0; slot < header.num_slots; ++slot) {
      *done(slot) = generations;
      if (generations == 0) continue;
      *word(slot) = ring_word(generations, count);
      for (u64 i = 0; i < count; ++i) words(slot, i)[3] = words(slot, i)[7] = *word(slot);
    }
  }
  // Also what is not used of a ring whose completion words, or whose slots, are another one's.
  void poison(bool has_slots, bool has_dones) const {
    ASAN_POISON_MEMORY_REGION(head() + 1, 120);
    for (u64 slot = 0; slot < header.num_slots; ++slot) {
      const u64 slot_bytes = static_cast<u64>(header.slot_bytes);
      const u64* end = words(slot, header.max_descriptors);
      const u64 used = static_cast<u64>(offset_of(end) - header.word_at(slot));
      ASAN_POISON_MEMORY_REGION(done(slot) + has_dones, 128 - 8 * has_dones);
      ASAN_POISON_MEMORY_REGION(word(slot) + has_slots, has_slots ? 120 : slot_bytes);
      ASAN_POISON_MEMORY_REGION(end, slot_bytes - used);
    }
  }

  const RingHeader header;
  const Memory memory;
  char* const base;
};

// What a GPU's loads of vectors see of memory that is written meanwhile: the two of a half of a
// descriptor, which two lanes load by one instruction, come as of one moment. Here the lanes load
// one after the other, so the second has what was there when the first one did.
class Halves {
 public:
  uint4 load(const uint4* from) {
    const u64 address = reinterpret_cast<u64>(from);
    const u64 half = address & ~31ull;
    const unsigned which = address / 16 % 2;
    const auto found = open_.find(half);
    if (found != open_.end() && found->second.loaded != which) {
      const uint4 value = found->second.vectors[which];
      open_.erase(found);
      return value;
    }
    Open& open = open_[half];
    std::memcpy(open.vectors, reinterpret_cast<const void*>(half), 32);
    open.loaded = which;
    return open.vectors[which];
  }

 private:
  struct Open {
    uint4 vectors[2];
    unsigned loaded;
  };
  std::map<u64, Open> open_;
};

// RingProducer pushes to memory of its own; from there its stores come into the ring one by one, in
// the order of both/ring.h: fields in any, seals, word, head.
class StepwiseProducer {
 public:
  // It writes to one ring and finds the completion words in another one, which may be the same.
  StepwiseProducer(RingMemory& to, RingMemory& dones, Random& random)
      : to_(to),
        dones_(dones),
        own_(to.header.num_slots, to.header.max_descriptors),
        random_(random) {
    std::memcpy(own_.base, to.base, to.header.num_bytes);
  }

  // Of the push that is next, or under way.
  u64 ticket() const { return is_busy() ? ticket_ : producer().next(); }
  bool is_busy() const { return at_ < stores_.size(); }
  // Begins with a push if its slot is free.
  bool begin(std::vector<Descriptor> push) {
    for (u64 slot = 0; slot < own_.header.num_slots; ++slot) *own_.done(slot) = *dones_.done(slot);
    Descriptor* const reserved = producer().try_reserve();
    if (reserved == nullptr) return false;
    const std::set<size_t>& dead = dead_[ticket()];
    if (dead.count(push.size()) != 0) {  // one of them, at most: see die
      push.empty() ? push.resize(1) : push.pop_back();
    }
    std::copy(push.begin(), push.end(), reserved);
    ticket_ = producer().publish(static_cast<unsigned>(push.size()));
    list_stores(push.size());
    under_way_ = std::move(push);
    return true;
  }
  void step() {
    const i64 offset = stores_[at_++];
    *to_.at(offset) = *own_.at(offset);
    if (to_.at(offset) == to_.word(ticket_)) pushed[ticket_] = under_way_;
  }
  // Has the push that is under way come with a wrong seal.
  void spoil(u64 descriptor, int half, u64 bits) {
    own_.words(ticket_, descriptor)[4 * half + 3] ^= bits;
  }
  size_t num_under_way() const { return under_way_.size(); }
  void finish() {
    while (is_busy()) step();
  }
  // Between two stores. The next one pushes a different number of descriptors, as both/ring.h has
  // a gap where it does not.
  void die() {
    const bool is_whole = pushed.count(ticket_) != 0;
    if (!is_busy() || (!is_whole && !dead_[ticket_].empty())) return;
    if (!is_whole) dead_[ticket_].insert(under_way_.size());
    for (const i64 offset : stores_) *own_.at(offset) = *to_.at(offset);
    stores_.clear();
  }

  std::map<u64, std::vector<Descriptor>> pushed;  // by ticket, whole

 private:
  RingProducer producer() const { return RingProducer(own_.base); }
  void list_stores(size_t count) {
    at_ = 0;
    stores_.clear();
    const auto stored = [&](const u64* word) { stores_.push_back(own_.offset_of(word)); };
    for (size_t i = 0; i < count; ++i) {
      for (const int field : {0, 1, 2, 4, 5, 6}) stored(own_.words(ticket_, i) + field);
    }
    for (size_t i = stores_.size(); i > 1; --i) {
      std::swap(stores_[i - 1], stores_[random_.below(i64(i))]);
    }
    for (size_t i = 0; i < count; ++i) {
      for (const int seal : {3, 7}) stored(own_.words(ticket_, i) + seal);
    }
    stored(own_.word(ticket_));
    stored(own_.head());
  }

  RingMemory& to_;
  RingMemory& dones_;
  RingMemory own_;
  Random& random_;
  u64 ticket_ = 0;
  std::vector<i64> stores_;  // offsets
  size_t at_ = 0;
  std::vector<Descriptor> under_way_;
  std::map<u64, std::set<size_t>> dead_;  // counts of pushes whose producer died
};

constexpr FaultSite kFirstSite{5};  // of what is out of range; others follow
constexpr FaultSite kBusySite{11}, kBrokenSite{12};

// What pushes ask for: pieces of a source, to a destination that is given away from the front on.
class Content {
 public:
  Content(i64 src_bytes, i64 dst_bytes, i64 most_long, Random& random)
      : src("src", 1, src_bytes, src_bytes, random.below(128), random),
        dst("dst", 1, dst_bytes, dst_bytes, random.below(128), random),
        src_bytes_(src_bytes),
        dst_bytes_(dst_bytes),
        most_long_(most_long),
        random_(random) {}

  std::vector<Descriptor> any_push(unsigned max_descriptors) {
    const i64 max = max_descriptors;
    const i64 count = random_.pick({i64(0), i64(1), max, max, random_.below(max + 1)});
    std::vector<Descriptor> push;
    const bool has_long = random_.below(3) == 0;
    const i64 wrong_in = random_.pick({1 << 30, 1 << 30, 3, 30});
    const i64 wrong_from = random_.pick({i64(0), max / 2});
    for (i64 i = 0; i < count; ++i) {
      push.push_back(any_descriptor(has_long && random_.below(4) == 0));
      Descriptor& last = push.back();
      if (i < wrong_from || random_.below(wrong_in) != 0) continue;
      if (random_.below(2) == 0) last.src_off = src_bytes_ + 1 - last.len;
      if (random_.below(2) == 0) last.dst_off = -1 - random_.below(9);
    }
    return push;
  }
  // What the buffer should hold, and what may be reported, once the descriptors from `begin` to
  // `end` of a push in this slot have been consumed.
  void expect(const std::vector<Descriptor>& push, u32 slot, size_t begin, size_t end,
              FaultWord& fault) {
    for (size_t i = begin; i < std::min(end, push.size()); ++i) {
      const Descriptor& one = push[i];
      const i64 src_end = one.src_off + (one.count - 1) * one.src_stride + one.len;
      const auto wrong = [&](int part, i64 value, i64 bound) {
        fault.expect(FaultSite(u32(kFirstSite) + u32(part)), i64(slot) << 32 | i64(i), value,
                     bound);
      };
      if (one.len == 0) continue;
      if (src_end > src_bytes_) {
        wrong(kSrcPart, src_end, src_bytes_);
      } else if (one.dst_off < 0) {
        wrong(kDstPart, one.dst_off, dst_bytes_);
      } else {
        for (i64 k = 0; k < one.count; ++k) {
          std::memcpy(dst.expected(0) + one.dst_off + k * one.dst_stride,
                      src.row(0) + one.src_off + k * one.src_stride, one.len);
        }
      }
    }
  }
  void give_to(UnpackParams& params) {
    params.dst = dst.row(0);
    params.src = src.row(0);
    params.dst_bytes = dst_bytes_;
    params.src_bytes = src_bytes_;
    params.reads_host = random_.below(3) == 0;
    for (u32 part = 0; part < kNumParts; ++part) {
      params.sites[part] = FaultSite(u32(kFirstSite) + part);
    }
  }

  RowBuffer src, dst;

 private:
  Descriptor any_descriptor(bool is_long) {
    const i64 len = is_long ? random_.below(most_long_) : random_.pick({i64(0), random_.below(64)});
    const i64 count = len > 200 ? 1 : random_.pick({1, 1, 1, 2, 3});
    const i64 src_stride = random_.pick({len, len + 5}), dst_stride = len + random_.below(3);
    const i64 at = used_ + random_.below(9);
    if (at + count * dst_stride > dst_bytes_ || count * src_stride >= src_bytes_) return {0, 0, 0};
    used_ = at + count * dst_stride;
    const i64 from = random_.below(src_bytes_ - count * src_stride);
    return {from, at, static_cast<u32>(len), static_cast<u32>(count), src_stride, dst_stride};
  }

  i64 src_bytes_, dst_bytes_, most_long_, used_ = 0;
  Random& random_;
};

// A ring of some age with its producer and content, for kernels that consume it.
class RingRound {
 protected:
  RingRound(u32 num_slots, u32 max_descriptors, Random& random)
      : random_(random),
        num_slots_(num_slots),
        max_(max_descriptors),
        is_copy_(random.below(2) == 0),
        ring_(num_slots_, max_),
        host_(num_slots_, max_),
        content_(9000, 60'000, 6000, random),
        producer_(age(), is_copy_ ? host_ : ring_, random) {
    ring_.poison(true, !is_copy_);
    host_.poison(false, true);
  }

  RingMemory& dones() { return is_copy_ ? host_ : ring_; }
  u64 generation(u64 ticket) const { return ring_.header.generation(ticket); }
  u32 slot_of(u64 ticket) const { return ring_.header.slot(ticket); }
  void check(bool is_so, const char* what) const {
    if (!is_so) fail(what);
  }
  RingParams ring_params(u64 call, FaultWord& fault) {
    RingParams params{};
    params.ring = ring_.header;
    params.base = ring_.base;
    params.dones = dones().base + ring_.header.dones_at;
    params.state = state_.data();
    params.call = call;
    params.busy = kBusySite;
    params.broken = kBrokenSite;
    params.fault = fault.record();
    return params;
  }
  void check_state() const { check(state_ticket() == turn_, "turn"); }
  // The ticket that is next, as the kernel has it.
  u64 state_ticket() const { return state_[0].generations * num_slots_ + state_[0].slot; }
  void set_turn(u64 ticket) {
    turn_ = ticket;
    state_[0].generations = ticket / num_slots_;
    state_[0].slot = static_cast<u32>(ticket % num_slots_);
  }
  static void stop_watching() {
    on_fresh_load = nullptr, fresh_vector = nullptr, on_system_store = nullptr;
  }

  static constexpr u64 kOther = (7ull << 32) + 1;  // another call

  Random& random_;
  const u32 num_slots_, max_;
  const bool is_copy_;  // what kernels read is not where the completion words are
  RingMemory ring_, host_;
  Content content_;
  u64 turn_ = 0;                     // the ticket that is next, as the kernel should have it
  std::vector<RingState> state_{1};  // of exactly its size
  StepwiseProducer producer_;
  Halves halves_;

 private:
  RingMemory& age() {
    const u64 old = random_.pick({0ull, 1ull, 65'535ull, (1ull << 32) - 1, 1ull << 40});
    const unsigned left = static_cast<unsigned>(random_.below(max_ + 1));
    ring_.grow_old(old, left);
    host_.grow_old(old, left);
    set_turn(old * num_slots_);
    return ring_;
  }
};

}  // namespace emulate
