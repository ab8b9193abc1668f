// That the emulation computes what a GPU would, and ends the process at every kind of mistake that
// the sweeps rely on it to notice: `self_test MISTAKE` has to fail, `self_test` to pass.
#include <jitkern/copy.cuh>

#include <string_view>

#include "ops/system_memory.cuh"
#include "sweep.h"

namespace emulate {

constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kShuffled, Order::kUneven};

#define EXPECT(condition) \
  if (!(condition)) fail("not so: " #condition)

void warp_operations() {
  const int self = static_cast<int>(lane());
  const unsigned low = 0xffffu;
  EXPECT(__ballot_sync(~0u, self % 2) == 0xaaaaaaaau);
  EXPECT(__shfl_sync(~0u, self, 5) == 5);
  EXPECT(__shfl_sync(~0u, self, 1, 8) == self / 8 * 8 + 1);
  EXPECT(__shfl_up_sync(~0u, self, 3) == (self < 3 ? self : self - 3));
  EXPECT(__shfl_xor_sync(~0u, self, 6) == (self ^ 6));
  // The halves of a warp go different ways.
  const unsigned half = self < 16 ? low : ~low;
  EXPECT(__ballot_sync(half, 1) == half);
  if (self < 16) EXPECT(__ballot_sync(low, self == 2) == 4);
  __syncwarp();
  EXPECT(__syncthreads_or(threadIdx.x == 9) && !__syncthreads_and(threadIdx.x != 9));
  EXPECT(!__syncthreads_or(0) && __syncthreads_and(1));
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
    while (load_fresh(&word) == 0) continue;
    EXPECT(looks == 5 && load_fresh(&values).x == 1 && load_fresh(&values.w) == 5 && looks == 7);
    const u64 begin = jitkern::nanoseconds();
    while (load_fresh(&word) != 8 && waited < 1'000'000) waited = jitkern::nanoseconds() - begin;
  });
  EXPECT(waited == 1'000'000);
  // The producer is another block of the group; each block has barriers and warps of its own.
  on_fresh_load = let_others_run;
  launch_groups({2}, {32}, 2, order, [&] {
    if (blockIdx.x == 0) EXPECT(__syncthreads_and(1));
    EXPECT(__shfl_sync(~0u, blockIdx.x, 7) == blockIdx.x);
    if (blockIdx.x == 0) store_fresh(&values, make_uint4(9, 9, 9, 9));
    while (load_fresh(&values).x != 9) continue;
  });
  on_fresh_load = nullptr;
}

// Rows of 12 bytes, 16 apart, on a 16-byte boundary.
void mistake(std::string_view kind) {
  Random random(1);
  RowBuffer rows("rows", 4, 12, {0, 16}, random);
  const IntBuffer ints("ints", {1, 2, 3}, 4);
  FaultWord fault(0);
  volatile u32 sink = 0;
  volatile int large = INT32_MAX;
  const auto warp = [](auto thread) { launch_fibers({1}, {32}, Order::kForward, thread); };
  if (kind == "read behind a row") sink = rows.row(1)[12];
  if (kind == "write inside a row") rows.row(2)[3] ^= 1;
  if (kind == "read behind the indices") sink = static_cast<const char*>(ints.data())[12];
  if (kind == "unaligned vector") sink = load_vec<8>(rows.row(0) + 4).x;
  if (kind == "unaligned fresh load") sink = load_fresh(reinterpret_cast<u64*>(rows.row(0) + 4));
  if (kind == "signed overflow") sink = large + 1;
  if (kind == "barrier not for all") warp([] { threadIdx.x < 31 ? __syncthreads() : void(); });
  if (kind == "lane missing") warp([] { lane() != 4 ? __syncwarp() : void(); });
  if (kind == "lane outside mask") warp([] { __syncwarp(0xfffffffeu); });
  if (kind == "shuffle outside mask") warp([] { lane() < 4 ? __shfl_sync(0xfu, 1, 5) : 0; });
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
    fresh_loads_work(order);
  }
}
