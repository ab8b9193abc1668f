// PeerReducer on the CPU, by one thread per rank. A rank publishes its values in its own workspace,
// increments its epoch, waits for the epochs of all others, and reads their values.
//
// Values of epoch e are in half e % 2 of the workspace. Two halves are enough: a rank that writes
// epoch e + 2 has seen all others publish e + 1, which they do after they have read e.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "comm/peer_reduce.h"

namespace jitkern {

namespace {

constexpr u64 kSpins = 1024, kLooksPerClock = 256;

u32 load(const u32* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// The ranks that have not published this epoch yet, as bits.
u32 missing_ranks(const PeerReduceParams& p, u32 epoch) {
  u32 ranks = 0;
  for (u32 rank = 0; rank < p.slots.num_ranks; ++rank) {
    const u32 behind = epoch - load(&p.control_of(rank)->epochs[0]);  // epochs wrap around
    if (static_cast<i32>(behind) > 0) ranks |= 1u << rank;
  }
  return ranks;
}

PeerResult wait_for_all(const PeerReduceParams& p, u32 epoch, bool (*is_interrupted)()) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  u32 missing = 0;
  for (u64 looks = 1; (missing = missing_ranks(p, epoch)) != 0; ++looks) {
    if (looks < kSpins) continue;
    sched_yield();
    if (looks % kLooksPerClock != 0) continue;
    if (is_interrupted()) return {PeerResult::kInterrupted, missing};
    const bool is_late =
        p.deadline_ns != 0 && Clock::now() - start > std::chrono::nanoseconds(p.deadline_ns);
    if (is_late && (missing = missing_ranks(p, epoch)) != 0) return {PeerResult::kLate, missing};
  }
  return {PeerResult::kDone, 0};
}

// Adds `count` items that every rank has published at `offset`.
template <int kType>
void add_up(const PeerReduceParams& p, i64 offset, i64 count, char* out) {
  using Item = Bits<kType>;
  const auto value = [&](u32 rank, i64 i) {
    Item item;
    std::memcpy(&item, p.workspaces[rank] + offset + i * sizeof(Item), sizeof(Item));
    return float_of<kType>(item);
  };
  for (i64 i = 0; i < count; ++i) {
    float sum = value(0, i);
    for (u32 rank = 1; rank < p.slots.num_ranks; ++rank) sum = peer_sum(sum, value(rank, i));
    const Item item = bits_as<kType>(sum);
    std::memcpy(out + i * sizeof(Item), &item, sizeof(Item));
  }
}

}  // namespace

PeerResult peer_reduce_by_cpu(const PeerReduceParams& p, PeerWay way, int type,
                              bool (*is_interrupted)()) {
  PeerControl* const control = p.control();
  if (const u32 word = load(&control->intact); word != kUnwritten) {
    return {PeerResult::kBroken, word};
  }
  const auto add = type == kFloat32   ? add_up<kFloat32>
                   : type == kFloat16 ? add_up<kFloat16>
                                      : add_up<kBFloat16>;
  const i64 half_bytes = (p.slots.workspace_bytes() - kPeerControlBytes) / 2;
  // A barrier publishes nothing; a scatter publishes the parts of all ranks and reads its own.
  const bool is_scatter = way == kScatter;
  const i64 all_bytes = is_scatter ? p.part_bytes * p.slots.num_ranks : p.part_bytes;
  const i64 own_begin = is_scatter ? p.part_bytes * p.rank : 0;
  for (i64 at = 0; at == 0 || at < all_bytes; at += half_bytes) {
    const u32 epoch = control->epochs[0] + 1;
    const i64 offset = kPeerControlBytes + epoch % 2 * half_bytes;
    const i64 bytes = std::min(half_bytes, all_bytes - at);
    if (bytes > 0) std::memcpy(p.workspaces[p.rank] + offset, p.x + at, static_cast<size_t>(bytes));
    __atomic_store_n(&control->epochs[0], epoch, __ATOMIC_RELEASE);
    PeerResult result = wait_for_all(p, epoch, is_interrupted);
    if (result.kind != PeerResult::kDone) {
      __atomic_store_n(&control->intact, result.missing, __ATOMIC_RELEASE);
      if (result.kind == PeerResult::kInterrupted) return result;
      std::this_thread::sleep_for(std::chrono::nanoseconds(p.grace_ns()));
      return {result.kind, p.blamed(result.missing, load)};
    }
    const i64 begin = std::max(own_begin, at);
    const i64 end = std::min(own_begin + p.part_bytes, at + bytes);
    if (begin < end) {
      add(p, offset + begin - at, (end - begin) / item_bytes_of(type), p.out + begin - own_begin);
    }
  }
  return {PeerResult::kDone, 0};
}

}  // namespace jitkern
