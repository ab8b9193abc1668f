// That the emulation computes what a GPU would, and ends the process at every kind of mistake that
// the sweeps rely on it to notice: `self_test MISTAKE` has to fail, `self_test` to pass.
#include <jitkern/copy.cuh>

#include <string_view>

#include "ops/cluster.cuh"
#include "ops/system_memory.cuh"
#include "sweep.h"

namespace emulate {

constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kShuffled};

#define EXPECT(condition) \
  if (!(condition)) fail("not so: " #condition)

void warp_operations() {
  const int self = static_cast<int>(lane());
  const unsigned low = 0xffffu;
  EXPECT(__ballot_sync(~0u, self % 2) == 0xaaaaaaaau);
  EXPECT(__shfl_sync(~0u, self, 5) == 5);
  EXPECT(__shfl_sync(~0u, self, 1, 8) == self / 8 * 8 + 1);
  EXPECT(__shfl_up_sync(~0u, self, 3) == (self < 3 ? self : self - 3));
  // The halves of a warp go different ways.
  const unsigned half = self < 16 ? low : ~low;
  EXPECT(__ballot_sync(half, 1) == half);
  if (self < 16) EXPECT(__ballot_sync(low, self == 2) == 4);
  __syncwarp();
  EXPECT(__syncthreads_or(threadIdx.x == 9) && !__syncthreads_and(threadIdx.x != 9));
  EXPECT(!__syncthreads_or(0) && __syncthreads_and(1));
}

struct OfBlock {
  u32 value;
  u32 others[16];
};

// Every block sums up, in two rounds, what the blocks of its cluster have.
template <u32 kSize>
void sums_of_cluster() {
  OfBlock& own = jitkern::own_shared<OfBlock>();
  OfBlock& first = of_block(own, 0);  // which may not have begun
  const u32 rank = jitkern::cluster_rank(), begin = blockIdx.x / kSize * kSize;
  EXPECT(jitkern::cluster_size() == kSize && rank == blockIdx.x % kSize);
  EXPECT(own.others[rank] == 0xa5a5a5a5u);
  // Barriers and warps are of a block, however many the others have.
  for (u32 i = 0; i < rank; ++i) EXPECT(__syncthreads_or(threadIdx.x == i));
  EXPECT(__shfl_sync(~0u, blockIdx.x, 7) == blockIdx.x);
  for (u32 round = 0; round < 2; ++round) {
    if (threadIdx.x == 40) own.value = 100 * round + blockIdx.x;
    cluster_sync();
    if (threadIdx.x == 63) first.others[rank] = own.value;
    u32 sum = 0, told = 0;
    for (u32 i = 0; i < kSize; ++i) sum += of_block(own, i).value;
    cluster_sync();
    for (u32 i = 0; i < kSize; ++i) told += of_block(own.others[i], 0);
    EXPECT(sum == told && sum == kSize * (100 * round + begin) + kSize * (kSize - 1) / 2);
    cluster_sync();
  }
}

template <u32 kSize>
void clusters_work(Order order) {
  std::vector<unsigned> blocks;
  launch_clusters({3 * kSize}, {64}, kSize, order, [&] {
    if (threadIdx.x == 0) blocks.push_back(blockIdx.x);
    sums_of_cluster<kSize>();
  });
  const std::vector<unsigned> sorted = turns(3 * kSize, Order::kForward);
  if (order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
  if (order != Order::kShuffled || kSize > 2) {
    EXPECT((order == Order::kShuffled) == (blocks != sorted));
  }
}

// A producer that writes when the consumer looks for the fifth time, and one that never does.
void fresh_loads_work(Order order) {
  u64 word = 0;
  uint4 values = make_uint4(1, 2, 3, 4);
  int looks = 0;
  on_fresh_load = [&] {
    if (++looks == 5) word = 7, values.w = 5;
  };
  u64 waited = 0;
  launch_fibers({1}, {1}, order, [&] {
    while (load_acquire(&word) == 0) continue;
    EXPECT(looks == 5 && load_fresh(&values).x == 1 && load_fresh(&values.w) == 5 && looks == 7);
    const u64 begin = jitkern::nanoseconds();
    while (load_acquire(&word) != 8 && waited < 1'000'000) waited = jitkern::nanoseconds() - begin;
  });
  EXPECT(waited == 1'000'000);
  // The producer is another block of the cluster.
  on_fresh_load = let_others_run;
  launch_clusters({2}, {1}, 2, order, [&] {
    if (blockIdx.x == 0) store_release(&word, 9);
    while (load_acquire(&word) != 9) continue;
  });
  on_fresh_load = nullptr;
  // Stores are seen in front of them, and a vector as of another moment.
  on_system_store = [&](const void* to) { EXPECT(to == &word && word == 9); };
  fresh_vector = [](const uint4*) { return make_uint4(6, 7, 8, 9); };
  launch_fibers({1}, {1}, order, [&] {
    store_release(&word, 10);
    EXPECT(word == 10 && load_fresh(&values).w == 9);
    EXPECT(jitkern::claim(&word, 3) == 10 && word == 10);
  });
  on_system_store = nullptr, fresh_vector = nullptr;
  word = 0;
  EXPECT(jitkern::claim(&word, 3) == 0 && word == 3);
}

// Rows of 12 bytes, 16 apart, on a 16-byte boundary.
void mistake(std::string_view kind) {
  Random random(1);
  RowBuffer rows("rows", 4, 12, 16, 0, random);
  const IntBuffer ints("ints", {1, 2, 3}, 4);
  FaultWord fault(0);
  volatile u32 sink = 0;
  volatile int large = INT32_MAX, behind = 16;
  const auto own = []() -> OfBlock& { return jitkern::own_shared<OfBlock>(); };
  const auto warp = [](auto thread) { launch_fibers({1}, {32}, Order::kForward, thread); };
  const auto cluster = [](auto thread) { launch_clusters({2}, {1}, 2, Order::kForward, thread); };
  if (kind == "read behind a row") sink = rows.row(1)[12];
  if (kind == "write inside a row") rows.row(2)[3] ^= 1;
  if (kind == "read behind the indices") sink = static_cast<const char*>(ints.data())[12];
  if (kind == "unaligned vector") sink = load_vec<8>(rows.row(0) + 4).x;
  if (kind == "unaligned acquire") sink = load_acquire(reinterpret_cast<u64*>(rows.row(0) + 4));
  if (kind == "signed overflow") sink = large + 1;
  if (kind == "barrier not for all") warp([] { threadIdx.x < 31 ? __syncthreads() : void(); });
  if (kind == "lane missing") warp([] { lane() != 4 ? __syncwarp() : void(); });
  if (kind == "lane outside mask") warp([] { __syncwarp(0xfffffffeu); });
  if (kind == "shuffle outside mask") warp([] { lane() < 4 ? __shfl_sync(0xfu, 1, 5) : 0; });
  if (kind == "cluster barrier not for a block")
    cluster([] { blockIdx.x != 1 ? cluster_sync() : void(); });
  if (kind == "arrived twice") cluster([] { jitkern::cluster_arrive(), cluster_sync(); });
  if (kind == "block has returned")
    cluster([&] {
      OfBlock& other = of_block(own(), 1 - blockIdx.x);
      cluster_sync();
      if (blockIdx.x == 0) sink = other.value;  // the last that comes to a barrier goes on first
    });
  if (kind == "block has not begun") cluster([&] { of_block(own(), 1).value = 1; });
  if (kind == "not in shared memory") {
    u32 local = 0;
    cluster([&] { sink = of_block(local, 0); });
  }
  if (kind == "write behind shared memory")
    cluster([&] {
      cluster_sync();
      of_block(own(), 1).others[behind] = 1;
      cluster_sync();
    });
  if (kind == "fault not written") fault.expect(FaultSite{1}, 1, 2, 3);
  if (kind == "fault overwritten") fault.record()->value = 5;
  rows.check();
  fault.check();
  (void)sink;
}

}  // namespace emulate

int main(int argc, char** argv) {
  using namespace emulate;
  install_reports();
  now_running = "self test";
  if (argc > 1) {
    mistake(argv[1]);
    return 0;
  }
  for (const Order order : kOrders) {
    launch_fibers({1, 2}, {32, 2}, order, [] { warp_operations(); });
    clusters_work<2>(order);
    clusters_work<16>(order);
    fresh_loads_work(order);
  }
}
