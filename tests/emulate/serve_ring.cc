// A server of a DescriptorRing, of one block or of a cluster, while a producer pushes: until it is
// stopped, until nothing came for long, or until a push is wrong.
#include "ops/unpack_ring.cu"

#include "rings.h"

namespace emulate {

constexpr Config kConfig{UNPACK_SERVE_CONFIG};

constexpr int kThreads = 64;
using Serve =
    ServeRing<kThreads, kConfig.max_occupancy, kConfig.use_pdl, UNPACK_SERVE_PIECE_IN_FLIGHT,
              UNPACK_SERVE_IN_FLIGHT, UNPACK_PARTS_IN_FLIGHT, 4>;

constexpr int kRounds = 80;
constexpr u64 kCall = (5ull << 32) + 1;

// How it comes to its end.
enum Kind {
  kIdle,     // nothing comes
  kStop,     // it is told to, behind the last push
  kStopNow,  // or at any time
  kEndless,  // or while a producer always has a push there
  kBroken,   // by a push with a seal that is not its word
  kBusy,     // another call has the ring
  kChanges,  // another call takes a push while it begins
};

class Round : RingRound {
 public:
  Round(unsigned cluster_size, Random& random)
      : RingRound{random.pick({1u, 2u, 3u, 7u}),
                  random.pick({1u, 3u, 16u, 17u, 32u, 33u, 80u, 80u}), random},
        cluster_size_(cluster_size) {}

  void serve() {
    push_some();
    kind_ =
        random_.pick({kIdle, kStop, kStop, kStopNow, kEndless, kBroken, kBroken, kBusy, kChanges});
    now_running += ", kind " + std::to_string(kind_);
    num_pushes_ = random_.below(3 * num_slots_ + 2);
    pace_ = random_.pick({1, 3, 20});
    change_at_ = kind_ == kChanges ? 1 + random_.below(6) : -1;
    stop_at_ = kind_ == kStopNow ? 1 + random_.below(30'000) : -1;
    if (kind_ == kEndless) stop_at_ = 1 + random_.below(3000);
    is_busy_ = kind_ == kBusy;
    if (is_busy_) state_[0].owner = kOther;
    ServeParams params = any_params();
    last_ns_ = jitkern::nanoseconds();
    on_fresh_load = [this] { look_on(); };
    fresh_vector = [this](const uint4* from) { return halves_.load(from); };
    on_system_store = [this](const void* to) { completes(to); };
    launch_clusters({cluster_size_}, {kThreads}, cluster_size_, any_order(random_),
                    [&] { Serve::run(params); });
    stop_watching();
    check_end(params.idle_ns);
  }

 private:
  ServeParams any_params() {
    ServeParams params{};
    params.ring = ring_params(kCall, fault_);
    content_.give_to(params.unpack);
    params.unpack.fault = fault_.record();
    params.stop = stop_.data();
    const bool waits = kind_ == kStop || kind_ == kStopNow || kind_ == kEndless || kind_ == kBroken;
    params.idle_ns = waits ? ~0ull : 300'000;
    return params;
  }

  // Some pushes in front of the server.
  void push_some() {
    for (i64 count = random_.below(num_slots_ + 1); count > 0; --count) {
      if (!producer_.begin(content_.any_push(max_))) return;
      producer_.finish();
    }
  }
  void other_call() {
    if (state_[0].owner != 0 || producer_.pushed.count(turn_) == 0) return;
    *dones().done(turn_) = generation(turn_);
    set_turn(turn_ + 1);
  }
  void push_all() {
    while (producer_.begin(content_.any_push(max_))) producer_.finish();
  }
  void push_a_bit() {
    if (!producer_.is_busy()) {
      if (num_pushes_ == 0) return;
      if (!producer_.begin(content_.any_push(max_))) return;
      // Short, or until the server looks at words alone.
      pause_ = random_.pick({0, 0, 100, kind_ == kIdle ? 200 : 4600});
      --num_pushes_;
      if (kind_ == kBroken && !is_broken_ && random_.below(3) == 0) break_seal();
    } else if (random_.below(400) == 0) {
      producer_.die();
      is_broken_ =
          is_broken_ && (producer_.pushed.count(broken_ticket_) != 0 || producer_.is_busy());
    } else {
      producer_.step();
    }
  }
  void break_seal() {
    const i64 count = static_cast<i64>(producer_.num_under_way());
    if (count == 0) return;
    is_broken_ = true;
    broken_ticket_ = producer_.ticket();
    broken_at_ = static_cast<u64>(random_.below(count));
    producer_.spoil(broken_at_, random_.pick({0, 1}), 1ull << (16 + random_.below(48)));
  }
  void look_on() {
    check(++looks_ < 200'000, "it never ends");
    if (looks_ == change_at_) other_call();
    if (kind_ == kEndless) {
      push_all();
    } else if (pause_ > 0) {
      --pause_;
    } else if (random_.below(pace_) == 0) {
      push_a_bit();
    }
    const bool waits = (kind_ == kStop || kind_ == kBroken) && num_pushes_ == 0;
    if (looks_ == stop_at_ || (waits && !producer_.is_busy() && is_all_done())) stop();
    if (random_.below(9) == 0) let_others_run();
  }

  void stop() {
    if (stop_[0] == 0) most_done_ = num_done_ + 1;
    stop_[0] = 1;
  }

  bool is_all_done() const {
    return producer_.pushed.empty() || producer_.pushed.rbegin()->first < turn_;
  }
  // In front of the store that says so.
  void completes(const void* to) {
    check(state_[0].owner == kCall, "completes what another call may take");
    check(to == dones().done(turn_), "completes another slot than that which is next");
    const bool is_there = producer_.pushed.count(turn_) != 0;
    check(is_there && !(is_broken_ && turn_ == broken_ticket_), "completes what is not there");
    content_.expect(producer_.pushed[turn_], slot_of(turn_), 0, max_, fault_);
    ++turn_;
    check(++num_done_ <= most_done_, "begins with a push though it was told to stop");
    content_.dst.check();
    last_ns_ = jitkern::nanoseconds();
  }
  void check_end(u64 idle_ns) {
    const u64 waited = jitkern::nanoseconds() - last_ns_;
    is_busy_ |= kind_ == kChanges && fault_.record()->site == kBusySite;
    check(state_[0].owner == (kind_ == kBusy ? kOther : 0), "the owner");
    if (is_busy_) {
      check(num_done_ == 0, "serves what another call has");
      fault_.expect(kBusySite, 0, 0, 0);
    } else {
      check_reason(idle_ns, waited);
    }
    check_state();
    for (u32 slot = 0; slot < num_slots_; ++slot) {
      const u64 over = turn_ / num_slots_ + (slot < turn_ % num_slots_);
      check(*dones().done(slot) == over, "a completion word");
    }
    content_.dst.check();
    content_.src.check();
    fault_.check();
  }
  void check_reason(u64 idle_ns, u64 waited) {
    if (is_broken_) {  // of which what was handed over in front of the wrong seal is copied
      const u32 slot = slot_of(broken_ticket_);
      content_.expect(producer_.pushed[broken_ticket_], slot, 0,
                      broken_at_ / Serve::kChunk * Serve::kChunk, fault_);
      fault_.expect(kBrokenSite, slot, 0, 0);
      check(turn_ == broken_ticket_, "ends at another push than the wrong one");
    } else if (kind_ == kStop || kind_ == kEndless || kind_ == kBroken) {
      check(stop_[0] == 1, "ends though nobody told it to");
    } else if (kind_ != kStopNow) {
      // Each thread has looked at the clock once, some of them in front of the completion.
      check(waited > idle_ns - 100'000 && waited < idle_ns + 500'000, "waits for another time");
    }
  }

  const unsigned cluster_size_;
  std::vector<u32> stop_{0};
  FaultWord fault_{0};

  Kind kind_ = kIdle;
  bool is_busy_ = false, is_broken_ = false;
  u64 broken_ticket_ = 0, broken_at_ = 0, last_ns_ = 0;
  i64 num_pushes_ = 0, num_done_ = 0, pause_ = 0, pace_ = 1;
  i64 most_done_ = 1 << 30;  // once it is told to stop: the one that it has begun with
  i64 looks_ = 0, change_at_ = -1, stop_at_ = -1;
};

}  // namespace emulate

int main() {
  using namespace emulate;
  rounds("serve_ring", kRounds,
         [&](Random& random, int round) { Round(1u << round % 3, random).serve(); });
}
