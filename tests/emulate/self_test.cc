// That the emulation computes what a GPU would, and ends the process at every kind of mistake that
// the sweeps rely on it to notice: `self_test MISTAKE` has to fail, `self_test` to pass.
#include <jitkern/copy.cuh>

#include <string_view>

#include "buffers.h"

namespace emulate {

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

// Rows of 12 bytes, 16 apart, on a 16-byte boundary.
void mistake(std::string_view kind) {
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
  for (const Order order : {Order::kForward, Order::kReverse, Order::kShuffled}) works(order);
}
