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

char* workspaces[kRanks];
int board[kRanks];

// Makes a call, for which all ranks have to come.
void run(PeerReduceParams p, u32 rank, PeerWay way) {
  p.rank = rank;
  p.slots = kSlots;
  std::memcpy(p.workspaces, workspaces, sizeof(workspaces));
  p.deadline_ns = 2'000'000'000;
  if (peer_reduce_by_cpu(p, way, kFloat32, [] { return false; }).kind == PeerResult::kDone) return;
  std::fprintf(stderr, "FAILED: rank %u: others did not come\n", rank);
  std::_Exit(1);
}

void check(bool is_right, u32 rank, int call) {
  if (is_right) return;
  std::fprintf(stderr, "FAILED: rank %u, call %d: old or wrong\n", rank, call);
  std::_Exit(1);
}

// Ranks write the board before a barrier, read it after that, and write it again after the next.
void meet(u32 rank, int call) {
  board[rank] = call;
  run({}, rank, kMeet);
  for (const int seen : board) check(seen == call, rank, call);
  run({}, rank, kMeet);
}

void sum(u32 rank, int call) {
  const bool is_scatter = call % 2 == 1;
  const u32 part = 1 + static_cast<u32>(call) * 977 % 2000;  // beyond half of a workspace
  std::vector<float> x(is_scatter ? part * kRanks : part);
  for (u32 i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 1000 * 10 + rank);
  const u32 begin = is_scatter ? part * rank : 0;
  PeerReduceParams p{};
  p.x = reinterpret_cast<char*>(x.data());
  p.out = reinterpret_cast<char*>(x.data() + begin);
  p.part_bytes = 4 * i64(part);
  run(p, rank, is_scatter ? kScatter : kOneShot);
  for (u32 i = begin; i < begin + part; ++i) {
    check(x[i] == static_cast<float>(i % 1000 * 10 * kRanks + 3), rank, call);
  }
}

}  // namespace

int main() {
  for (char*& one : workspaces) {
    const auto bytes = static_cast<size_t>((kSlots.workspace_bytes() + 15) / 16 * 16);
    one = static_cast<char*>(std::aligned_alloc(16, bytes));
    std::memset(one, 0xff, bytes);
  }
  std::vector<std::thread> ranks;
  for (u32 rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([rank] {
      for (int call = 0; call < kCalls; ++call) call % 4 == 3 ? meet(rank, call) : sum(rank, call);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
