// Calls that consume a DescriptorRing: pushes that are there, that come meanwhile, that are wrong
// or whose producer dies; other calls that have the ring, or had it a moment ago.
#include "ops/unpack_ring.cu"

#include "rings.h"

namespace emulate {

constexpr Config kConfig{UNPACK_RING_CONFIG};
constexpr int kRounds = 100, kCalls = 10;

struct Kernel {
  unsigned num_threads;
  i64 at_once;  // descriptors that come with the word
  void (*run)(const ConsumeParams&);
};

template <int kThreads>
Kernel kernel() {
  using Consume =
      ConsumeRing<kThreads, kConfig.max_occupancy, kConfig.use_pdl, UNPACK_RING_PIECE_IN_FLIGHT,
                  UNPACK_RING_IN_FLIGHT, UNPACK_PARTS_IN_FLIGHT, 4>;
  return {kThreads, Consume::Reader::kAtOnce, Consume::run};
}

// What happens while a call is under way.
enum Kind {
  kNothing,
  kWrong,    // a push that no producer has left like this
  kPushes,   // others come
  kBusy,     // another call has the ring
  kChanges,  // another call takes pushes while this one begins
  kIsTaken,  // or has the ring from then on
};

class Round : RingRound {
 public:
  Round(const Kernel& kernel, Random& random)
      : RingRound{random.pick({1u, 2u, 3u, 7u}), any_max(kernel, random), random},
        kernel_(kernel),
        board_(1),
        staged_(u64(num_slots_) * max_) {}

  void calls(const std::string& name) {
    fresh_vector = [this](const uint4* from) { return halves_.load(from); };
    for (int i = 0; i < kCalls; ++i) {
      now_running = name + ", call " + std::to_string(i);
      call();
    }
    stop_watching();
    content_.src.check();
  }

 private:
  static u32 any_max(const Kernel& kernel, Random& random) {
    const i64 most = kernel.at_once;
    return static_cast<u32>(
        random.pick({i64(1), i64(3), most - 1, most, most + 1, 3 * most, 3 * most}));
  }
  RingState& state() { return state_[0]; }

  bool is_there(u64 ticket) const {
    return producer_.pushed.count(ticket) != 0 && ticket != wrong_ticket_;
  }
  // The pushes that a call takes that looks now.
  std::vector<u64> takeable(size_t most) const {
    std::vector<u64> found;
    for (u64 ticket = turn_; found.size() < most && is_there(ticket); ++ticket) {
      found.push_back(ticket);
    }
    return found;
  }
  void check_dones() {
    for (u32 slot = 0; slot < num_slots_; ++slot) {
      check(*dones().done(slot) == dones_[slot], "a completion word");
    }
  }
  void check_staged(const std::vector<u64>& tickets) {
    const u64* words = reinterpret_cast<const u64*>(staged_.data());
    for (const u64 ticket : tickets) {
      const std::vector<Descriptor>& push = producer_.pushed[ticket];
      for (u32 i = 0; i < push.size(); ++i, words += 8) {
        u64 pushed[8];
        std::memcpy(pushed, &push[i], sizeof(pushed));
        check(
            std::equal(pushed, pushed + 3, words) && std::equal(pushed + 4, pushed + 6, words + 4),
            "a descriptor that was not pushed");
        check(words[6] == (u64(slot_of(ticket)) << 32 | i), "the name of a descriptor");
      }
    }
  }

  // Some pushes, the last of them perhaps not all of it.
  void push_some() {
    for (i64 count = random_.below(2 * num_slots_); count > 0; --count) {
      if (!producer_.is_busy() && !producer_.begin(content_.any_push(max_))) return;
      if (random_.below(4) == 0) {
        for (i64 steps = random_.below(90); steps > 0 && producer_.is_busy(); --steps) {
          producer_.step();
        }
        if (random_.below(3) == 0) return;
        producer_.die();
      }
      producer_.finish();
    }
  }
  void push_a_bit() {
    if (!producer_.is_busy()) {
      if (random_.below(20) == 0) producer_.begin(content_.any_push(max_));
    } else if (random_.below(300) == 0) {
      producer_.die();
    } else {
      producer_.step();
    }
  }
  // Another call comes and has gone, or stays, if nobody is there.
  void other_call() {
    if (state().owner != 0) return;
    if (kind_ == kIsTaken) {
      state().owner = kOther;
    } else if (is_there(turn_)) {
      *dones().done(turn_) = dones_[slot_of(turn_)] = generation(turn_);
      set_turn(turn_ + 1);
      least_ = takeable(most_).size();
    }
    was_other_ = true;
  }
  // One that is there becomes none; the words that were changed, as they were.
  std::vector<std::pair<u64*, u64>> make_wrong() {
    std::vector<std::pair<u64*, u64>> before;
    const std::vector<u64> tickets = takeable(most_);
    if (tickets.empty()) return before;
    const u64 ticket = tickets[random_.below(i64(tickets.size()))];
    const auto change = [&](u64* at, u64 value) {
      before.emplace_back(at, *at);
      *at = value;
    };
    const u64 word = *ring_.word(ticket), count = ring_count(word), same = ring_generation(word);
    const i64 kind = random_.below(count == 0 ? 2 : 5);
    if (kind == 0) {
      const u64 far = 1ull << random_.pick({15, 32, 47});
      change(ring_.word(ticket),
             ring_word(random_.pick({same - 1, same + 1, same ^ far, same ^ far}), count));
    } else if (kind == 1) {
      change(ring_.word(ticket), ring_word(same, random_.pick({max_ + 1, 65'535u})));
    } else {  // one seal
      const i64 which = random_.pick({i64(count) / 2, random_.below(i64(count))});
      u64* const seal = ring_.words(ticket, static_cast<u64>(which)) + 3;
      const u64 wrong = random_.pick({word - (1 << 16), word ^ 1, word ^ 1ull << 32, u64(0)});
      change(kind == 2 ? seal : seal + 4, wrong);
    }
    for (u64 i = 0; kind < 2 && i < count; ++i) {
      for (const int seal : {3, 7}) change(ring_.words(ticket, i) + seal, *ring_.word(ticket));
    }
    wrong_ticket_ = ticket;
    return before;
  }

  ConsumeParams any_params(FaultWord& fault) {
    ConsumeParams params{};
    call_ = (random_.bits() & 0xff) << 32 | 3;
    params.ring = ring_params(call_, fault);
    content_.give_to(params.unpack);
    params.unpack.fault = fault.record();
    params.board = board_.data();
    params.staged = staged_.data();
    params.most = most_;
    return params;
  }
  void look_on() {
    check(++looks_ < 200'000, "it never ends");
    const bool counts = !changes_taker_ || (blockIdx.x == 0 && threadIdx.x == 32);
    if (counts && --change_in_ == 0) other_call();
    if (kind_ == kPushes && random_.below(pace_) == 0) push_a_bit();
    if (random_.below(6) == 0) let_others_run();
  }

  void call() {
    most_ = static_cast<u32>(1 + random_.below(num_slots_));
    push_some();
    kind_ = random_.pick(
        {kNothing, kWrong, kWrong, kPushes, kPushes, kBusy, kChanges, kChanges, kIsTaken});
    now_running += ", kind " + std::to_string(kind_);
    pace_ = random_.pick({2, 20, 200});
    looks_ = 0;
    // At any moment, or while the thread that takes the ring does.
    changes_taker_ = random_.below(2) == 0;
    const bool changes = kind_ == kChanges || kind_ == kIsTaken;
    change_in_ = changes ? 1 + random_.below(changes_taker_ ? 4 : 2 * kernel_.num_threads) : -1;
    was_other_ = kind_ == kBusy;
    is_complete_ = false;
    wrong_ticket_ = ~0ull;
    const auto wrong = kind_ == kWrong ? make_wrong() : std::vector<std::pair<u64*, u64>>();
    state().owner = kind_ == kBusy ? kOther : 0;
    for (u32 slot = 0; slot < num_slots_; ++slot) dones_[slot] = *dones().done(slot);
    least_ = takeable(most_).size();
    FaultWord fault(kind_ == kChanges ? 0 : random_.pick({0u, 0u, 0u, 1u}));
    const unsigned blocks = random_.pick({1u, 2u, 5u});
    const ConsumeParams params = any_params(fault);
    on_fresh_load = [this] { look_on(); };
    on_system_store = [&](const void* to) {
      if (to == &board_[0].control) return;
      check(state().owner == call_, "completes what another call may take");
      if (!is_complete_) check_copies(fault);
    };
    // Blocks that run at the same time, as those of a cluster do.
    launch_clusters({blocks}, {kernel_.num_threads}, blocks, any_order(random_),
                    [&] { kernel_.run(params); });
    check_end(fault);
    for (const auto& [at, value] : wrong) *at = value;
  }

  // Behind the copies, in front of the first completion: what was taken, which is to be there.
  void check_copies(FaultWord& fault) {
    is_complete_ = true;
    const u64 num_taken = state_ticket() - turn_;
    check(num_taken <= most_, "too many pushes");
    check(num_taken >= least_, "a push that is there was not taken");
    const std::vector<u64> now = takeable(num_taken);
    check(now.size() == num_taken, "a push that is not there");
    for (const u64 ticket : now) {
      dones_[slot_of(ticket)] = generation(ticket);
      content_.expect(producer_.pushed[ticket], slot_of(ticket), 0, max_, fault);
    }
    turn_ += num_taken;
    check_staged(now);
    content_.dst.check();
  }

  void check_end(FaultWord& fault) {
    const bool was_busy =
        kind_ == kChanges ? fault.record()->site == kBusySite : state().owner == kOther;
    check(!was_busy || was_other_, "found another call where there was none");
    check(was_busy || kind_ != kBusy, "took what another call has");
    check(state().owner == (was_other_ && kind_ != kChanges ? kOther : 0), "the owner");
    if (was_busy) {
      fault.expect(kBusySite, 0, 0, 0);
      check(!is_complete_, "completes what it has not taken");
      content_.dst.check();
    } else if (!is_complete_) {
      check_copies(fault);
    }
    content_.dst.check();
    check_dones();
    check_state();
    check(board_[0].control == 0 && board_[0].num_arrived == 0, "the board");
    fault.check();
  }

  const Kernel& kernel_;
  std::map<u32, u64> dones_;  // completion words, as the kernels should have them
  std::vector<RingBoard> board_;
  std::vector<Descriptor> staged_;

  Kind kind_ = kNothing;
  u64 call_ = 0;
  u32 most_ = 1;
  size_t least_ = 0;  // pushes that the call has to take
  u64 wrong_ticket_ = ~0ull;
  bool was_other_ = false;  // call
  bool is_complete_ = false, changes_taker_ = false;
  i64 looks_ = 0, change_in_ = -1, pace_ = 1;
};

void all_rounds(const char* name, const Kernel& kernel) {
  rounds(std::string("unpack_ring: ") + name, kRounds,
         [&](Random& random, int) { Round(kernel, random).calls(std::string(now_running)); });
}

}  // namespace emulate

int main() {
  using namespace emulate;
  all_rounds("64 threads", kernel<64>());
#ifndef SWEEP_FEW
  all_rounds("128 threads", kernel<128>());
#endif
}
