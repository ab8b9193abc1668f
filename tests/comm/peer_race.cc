// Ranks as threads of a process, as fast as they can, by what csrc/comm/peer_reduce_by_cpu.cc does:
// sums are checked, and ThreadSanitizer looks on.
#include "comm/peer_reduce.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using namespace jitkern;

constexpr u32 kRanks = 3;
constexpr int kCalls = 800;
constexpr PeerSlots kSlots{kRanks, 2};

[[noreturn]] void fail(const char* what, u32 rank, int call) {
  std::fprintf(stderr, "FAILED: rank %u, call %d: %s\n", rank, call, what);
  std::_Exit(1);
}

// Numbers that follow from the call alone.
u32 any(int call, u32 which) {
  u64 state = static_cast<u64>(call) * 0x9e3779b97f4a7c15u + which;
  for (int i = 0; i < 3; ++i) state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<u32>(state >> 40);
}
float value(int call, u32 rank, u32 i) {
  if (any(call, 9 * i + rank) % 31 == 0) return float_of_bits(kUnwritten);
  return static_cast<float>(any(call, 7 * i + rank) % 1000) + static_cast<float>(rank) / 8;
}

PeerReduceParams params_of(char* const* workspaces, u32 rank) {
  PeerReduceParams p{};
  p.rank = rank;
  p.slots = kSlots;
  std::memcpy(p.workspaces, workspaces, kRanks * sizeof(char*));
  p.deadline_ns = 2'000'000'000;
  return p;
}

// Ranks write it before a barrier, read all of it after that, and write it again after the next.
int board[kRanks];
void barrier(char* const* workspaces, u32 rank, int call) {
  const PeerReduceParams p = params_of(workspaces, rank);
  const PeerResult result = peer_reduce_by_cpu(p, kMeet, kFloat32, [] { return false; });
  if (result.kind != PeerResult::kDone) fail("others did not come to a barrier", rank, call);
}
void meet(char* const* workspaces, u32 rank, int call) {
  board[rank] = call;
  barrier(workspaces, rank, call);
  for (const int seen : board) {
    if (seen != call) fail("old behind a barrier", rank, call);
  }
  barrier(workspaces, rank, call);
}

void one_call(char* const* workspaces, u32 rank, int call) {
  if (any(call, 4) % 4 == 0) return meet(workspaces, rank, call);
  const bool is_scatter = any(call, 2) % 2 == 1;
  const u32 part = 1 + any(call, 1) % 2000;  // beyond half of a workspace
  const u32 count = is_scatter ? part * kRanks : part;
  std::vector<float> x(count);
  for (u32 i = 0; i < count; ++i) x[i] = value(call, rank, i);
  PeerReduceParams p = params_of(workspaces, rank);
  const u32 begin = is_scatter ? part * rank : 0;
  p.x = reinterpret_cast<char*>(x.data());
  p.out = reinterpret_cast<char*>(x.data() + begin);
  p.part_bytes = 4 * i64(part);
  const PeerResult result =
      peer_reduce_by_cpu(p, is_scatter ? kScatter : kOneShot, kFloat32, [] { return false; });
  if (result.kind != PeerResult::kDone) fail("others did not come", rank, call);
  for (u32 i = begin; i < begin + part; ++i) {
    const float sum = value(call, 0, i) + value(call, 1, i) + value(call, 2, i);
    if (sum == sum ? x[i] != sum : x[i] == x[i]) fail("another sum", rank, call);
  }
}

}  // namespace

int main() {
  char* workspaces[kRanks];
  for (char*& one : workspaces) {
    const auto bytes = static_cast<size_t>((kSlots.workspace_bytes() + 15) / 16 * 16);
    one = static_cast<char*>(std::aligned_alloc(16, bytes));
    std::memset(one, 0xff, bytes);
  }
  std::vector<std::thread> ranks;
  for (u32 rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&workspaces, rank] {
      for (int call = 0; call < kCalls; ++call) one_call(workspaces, rank, call);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (char* one : workspaces) std::free(one);
}
