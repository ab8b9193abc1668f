// That the emulation computes what a GPU would, and ends the process at every kind of mistake that
// the sweeps rely on it to notice: `self_test MISTAKE` has to fail, `self_test` to pass.
#include <jitkern/copy.cuh>

#include <string_view>

#include "ops/cluster.cuh"
#include "ops/system_memory.cuh"
#include "sweep.h"

namespace emulate {

using jitkern::cluster_sync;
using jitkern::load_acquire;
using jitkern::load_fresh;
using jitkern::of_block;

constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kShuffled};

#define EXPECT(condition) \
  if (!(condition)) fail("not so: " #condition)

// The sum over a block by shuffles, shared memory and two barriers.
void sum_of_block(const int* values, int* sum) {
  __shared__ int of_warp[32];
  int own = values[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  own = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0;
  for (int step = 16; step > 0; step /= 2) own += __shfl_down_sync(0xffffffffu, own, step);
  if (threadIdx.x == 0) atomicAdd(sum, own);
}

void warp_operations() {
  const int self = static_cast<int>(lane());
  const unsigned low = 0xffffu;
  EXPECT(__ballot_sync(~0u, self % 2) == 0xaaaaaaaau);
  EXPECT(__shfl_sync(~0u, self, 5) == 5);
  EXPECT(__shfl_sync(~0u, self, 1, 8) == self / 8 * 8 + 1);
  EXPECT(__shfl_up_sync(~0u, self, 3) == (self < 3 ? self : self - 3));
  EXPECT(__shfl_down_sync(~0u, self, 3, 16) == (self % 16 > 12 ? self : self + 3));
  EXPECT(__match_any_sync(~0u, self / 16) == (self < 16 ? low : ~low));
  EXPECT(__all_sync(~0u, 1) && __any_sync(~0u, self == 7) && !__all_sync(~0u, self != 7));
  // The halves of a warp go different ways.
  const unsigned half = self < 16 ? low : ~low;
  EXPECT(__ballot_sync(half, 1) == half);
  if (self < 16) EXPECT(__ballot_sync(low, self == 2) == 4);
  __syncwarp();
  EXPECT(__syncthreads_count(threadIdx.x < 5) == 10);
  EXPECT(__syncthreads_or(threadIdx.x == 9) && !__syncthreads_and(threadIdx.x != 9));
}

void works(Order order) {
  std::vector<int> values(256);
  for (int i = 0; i < 256; ++i) values[i] = i * i;
  int sum = 0;
  launch_fibers({3}, {256}, order, [&] { sum_of_block(values.data(), &sum); });
  EXPECT(sum == 3 * 5559680);
  launch_fibers({1, 2}, {32, 2}, order, [] { warp_operations(); });
}

// ---- clusters

struct OfBlock {
  u32 value;
  u32 others[16];
};

// `sums[round][block]`: the sum of what the blocks of its cluster have in that round.
template <u32 kSize>
void sums_of_cluster(u32 (*sums)[48], std::vector<unsigned>* turns_of_blocks) {
  if (threadIdx.x == 0) turns_of_blocks->push_back(blockIdx.x);
  OfBlock& own = jitkern::own_shared<OfBlock>();
  OfBlock& first = of_block(own, 0);  // which may not have begun
  const u32 rank = jitkern::cluster_rank();
  EXPECT(jitkern::cluster_size() == kSize && rank == blockIdx.x % kSize);
  EXPECT(own.others[rank] == 0xa5a5a5a5u);
  // Barriers and warps are of a block, however many the others have.
  for (u32 i = 0; i < rank; ++i) EXPECT(__syncthreads_count(threadIdx.x < i) == int(i));
  EXPECT(__shfl_sync(~0u, blockIdx.x, 7) == blockIdx.x);
  for (u32 round = 0; round < 2; ++round) {
    if (threadIdx.x == 40) own.value = 100 * round + blockIdx.x;
    cluster_sync();
    cluster_sync();
    if (threadIdx.x == 63) first.others[rank] = own.value;
    u32 sum = 0;
    for (u32 i = 0; i < kSize; ++i) sum += of_block(own.value, i);
    cluster_sync();
    for (u32 i = 0; i < kSize; ++i) sum -= first.others[i];
    EXPECT(sum == 0);
    if (threadIdx.x == rank) {
      for (u32 i = 0; i < kSize; ++i) sums[round][blockIdx.x] += of_block(own, i).value;
    }
    cluster_sync();
  }
}

template <u32 kSize>
void clusters_work(Order order) {
  u32 sums[2][48] = {};
  std::vector<unsigned> blocks;
  launch_clusters({3 * kSize}, {64}, kSize, order, [&] { sums_of_cluster<kSize>(sums, &blocks); });
  for (u32 b = 0; b < 3 * kSize; ++b) {
    const u32 sum = b / kSize * kSize * kSize + kSize * (kSize - 1) / 2;
    EXPECT(sums[0][b] == sum && sums[1][b] == sum + 100 * kSize);
  }
  const std::vector<unsigned> sorted = turns(3 * kSize, Order::kForward);
  if (order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
  if (order != Order::kShuffled) EXPECT(blocks == sorted);
  if (order == Order::kShuffled && kSize > 2) EXPECT(blocks != sorted);
}

struct SizeParams {
  u32* sizes;
  FaultRecord* fault;
};

void sweeps_have_clusters() {
  constexpr u32 kSize = 4;
  Random random(kSize);
  Tally tally;
  FaultWord fault(0);
  u32 sizes[8] = {};
  const auto run = [](const SizeParams& p) {
    cluster_sync();
    atomicAdd(&p.sizes[blockIdx.x], jitkern::cluster_size());
  };
  run_kernel<SizeParams>({0, 0, 0, 0, 2, run, kSize}, {8}, 2, random, {sizes, fault.record()},
                         tally);
  for (const u32 found : sizes) EXPECT(found == 2 * kSize);
}

// ---- memory that others write

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
    if (blockIdx.x == 0) jitkern::store_release(&word, 9);
    while (load_acquire(&word) != 9) continue;
  });
  on_fresh_load = nullptr;
  // Stores are seen in front of them, and a vector as of another moment.
  on_system_store = [&](const void* to) { EXPECT(to == &word && word == 9); };
  fresh_vector = [](const uint4*) { return make_uint4(6, 7, 8, 9); };
  launch_fibers({1}, {1}, order, [&] {
    jitkern::store_release(&word, 10);
    EXPECT(word == 10 && load_fresh(&values).w == 9);
    EXPECT(jitkern::claim(&word, 3) == 10 && word == 10);
  });
  on_system_store = nullptr, fresh_vector = nullptr;
  word = 0;
  EXPECT(jitkern::claim(&word, 3) == 0 && word == 3);
}

// ---- mistakes

template <class Thread>
void in_clusters(unsigned size, Thread thread) {
  launch_clusters({size}, {1}, size, Order::kForward, thread);
}

void mistake_in_cluster(std::string_view kind) {
  volatile u32 sink = 0;
  const auto own = []() -> OfBlock& { return jitkern::own_shared<OfBlock>(); };
  if (kind == "cluster barrier not for a block")
    in_clusters(4, [] {
      if (blockIdx.x != 2) cluster_sync();
    });
  if (kind == "cluster barrier not for a thread")
    launch_clusters({2}, {32}, 2, Order::kReverse, [] {
      if (blockIdx.x == 0 || threadIdx.x != 9) cluster_sync();
    });
  if (kind == "second cluster barrier not for all")
    in_clusters(2, [] {
      cluster_sync();
      if (blockIdx.x == 0) cluster_sync();
    });
  if (kind == "arrived twice")
    in_clusters(2, [] {
      jitkern::cluster_arrive();
      cluster_sync();
    });
  if (kind == "waits without having arrived") in_clusters(2, [] { jitkern::cluster_wait(); });
  if (kind == "half a cluster") launch_clusters({3}, {1}, 2, Order::kForward, [] {});
  if (kind == "block has returned")
    in_clusters(2, [&] {
      OfBlock& other = of_block(own(), 1 - blockIdx.x);
      cluster_sync();
      if (blockIdx.x == 0) sink = other.value;  // the last that comes to a barrier goes on first
    });
  if (kind == "asked of a block that has returned")
    in_clusters(2, [&] {
      cluster_sync();
      if (blockIdx.x == 0) sink = of_block(own(), 1).value;
    });
  if (kind == "block has not begun") in_clusters(2, [&] { of_block(own(), 1).value = 1; });
  if (kind == "no such block") in_clusters(2, [&] { sink = of_block(own(), 2).value; });
  if (kind == "not in shared memory")
    in_clusters(2, [&] {
      u32 local = 0;
      sink = of_block(local, 0);
    });
  if (kind == "write behind shared memory")
    in_clusters(2, [&] {
      cluster_sync();
      volatile int behind = 16;
      of_block(own(), 1).others[behind] = 1;
      cluster_sync();
    });
  if (kind == "unaligned shared memory")
    in_clusters(1, [&] { sink = reinterpret_cast<uint4*>(&own())->x; });
  if (kind == "shared memory without fibers") {
    void (*run)(const int&) = [](const int&) { jitkern::own_shared<OfBlock>().value = 1; };
    launch({1}, {2}, Order::kForward, run, 0);
  }
}

// Rows of 12 bytes, 16 apart, on a 16-byte boundary.
void mistake(std::string_view kind) {
  mistake_in_cluster(kind);
  Random random(1);
  RowBuffer rows("rows", 4, 12, 16, 0, random);
  const IntBuffer ints("ints", {1, 2, 3}, 4);
  volatile char sink = 0;
  const auto once = [](auto thread) { launch_fibers({1}, {32}, Order::kForward, thread); };
  if (kind == "read behind a row") sink = rows.row(1)[12];
  if (kind == "read behind the buffer") sink = rows.row(3)[12];
  if (kind == "write behind a row") rows.row(0)[12] = 1;
  if (kind == "write inside a row") rows.row(2)[3] ^= 1;
  if (kind == "read behind the indices") sink = static_cast<const char*>(ints.data())[12];
  if (kind == "unaligned vector") sink = jitkern::load_vec<8>(rows.row(0) + 4).x;
  if (kind == "unaligned fresh load")
    sink = load_fresh(reinterpret_cast<const uint4*>(rows.row(0) + 8)).x;
  if (kind == "unaligned acquire") sink = load_acquire(reinterpret_cast<u64*>(rows.row(0) + 4));
  if (kind == "unaligned release")
    jitkern::store_release(reinterpret_cast<u64*>(rows.row(0) + 4), 1);
  if (kind == "unaligned claim") jitkern::claim(reinterpret_cast<u64*>(rows.row(0) + 4), 1);
  if (kind == "fresh load behind a row")
    sink = load_fresh(reinterpret_cast<const uint4*>(rows.row(1))).x;
  if (kind == "acquire behind the buffer")
    sink = load_acquire(reinterpret_cast<u64*>(rows.row(3) + 16));
  volatile int large = INT32_MAX;
  if (kind == "signed overflow") sink = static_cast<char>(large + 1);
  if (kind == "barrier not for all")
    once([] {
      if (threadIdx.x < 31) __syncthreads();
    });
  if (kind == "lane missing")
    once([] {
      if (lane() != 4) __syncwarp();
    });
  if (kind == "lane outside mask") once([] { __syncwarp(0xfffffffeu); });
  if (kind == "shuffle outside mask")
    once([] {
      if (lane() < 4) __shfl_sync(0xfu, 1, 5);
    });
  if (kind == "barrier without fibers") {
    void (*run)(const int&) = [](const int&) { __syncthreads(); };
    launch({1}, {2}, Order::kForward, run, 0);
  }
  rows.check();
  FaultWord fault(0);
  if (kind == "fault not written") fault.expect(FaultSite{1}, 1, 2, 3);
  if (kind == "fault overwritten") fault.record()->value = 5;
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
  sweeps_have_clusters();
  for (const Order order : kOrders) {
    works(order);
    clusters_work<1>(order);
    clusters_work<2>(order);
    clusters_work<4>(order);
    clusters_work<16>(order);
    fresh_loads_work(order);
  }
}
