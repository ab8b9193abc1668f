// The kernels of merge_states on exact buffers, compared with double; and Divisor.
#include "ops/merge.cu"

#include "merge_calls.h"
#include "sweep.h"

namespace emulate {

// A specialisation, as merge.py names it.
template <int kDim, int kElems, int kIn, int kOut, int kCapacity, bool kPlain, int kThreads,
          int kRowThreads, int kRows, int kTimes>
struct Kernel {
  using Params = MergeParams<kCapacity>;
  using Merge =
      jitkern::Merge<kDim, kElems, kIn, kOut, kCapacity, kPlain, kThreads, 1, true, kRowThreads>;

  // Gives the kernel the parameters of its capacity, and no bytes behind them.
  static void launch(const MergeParams<kMostStates>& all, unsigned blocks, unsigned threads,
                     Order order) {
    const auto params = std::make_unique<Params>();
    std::memcpy(static_cast<void*>(params.get()), &all, sizeof(Params));
    launch_fibers({blocks}, {threads}, order, [&] { Merge::run(*params); });
  }
  static MergeKernel described() {
    return {kDim, kElems, kIn, kOut, kCapacity, kPlain, kThreads, kRows, kTimes, launch};
  }
};

template <class... Kernels>
std::vector<MergeKernel> list_of() {
  return {Kernels::described()...};
}

// One call by threads in all orders, any of which is the first and is compared with the reference:
// the others give the same bits.
void one_run(const MergeKernel& kernel, Random& random) {
  MergeRun run(kernel, random);
  const unsigned blocks = ceil_div(run.num_rows(), run.params().to.rows_of_block);
  const unsigned threads = run.num_threads();
  const unsigned idle = blocks == 0 || random.below(4) == 0;  // whose rows are behind the last
  std::vector<Order> orders = {Order::kForward, Order::kReverse, Order::kShuffled};
  std::swap(orders[0], orders[random.below(3)]);
  for (const Order order : orders) {
    run.begin();
    kernel.launch(run.params(), blocks + idle, threads, order);
    run.end();
  }
}

void check_divisor(u32 value, Random& random) {
  now_running = "division by " + std::to_string(value);
  const Divisor divisor = Divisor::of(value);
  const i64 most = kMostRows / value;
  // Multiples are where quotients change: the first ones, the last ones, any.
  for (i64 i = 0; i < 40; ++i) {
    for (const i64 times : {i, most - i, random.below(most + 1)}) {
      for (const i64 n : {times * value - 1, times * value, times * value + 1}) {
        if (n < 0 || n > kMostRows || divisor.quotient(static_cast<u32>(n)) == n / value) continue;
        fail(std::to_string(n) + " is divided wrongly");
      }
    }
  }
}

}  // namespace emulate

int main() {
  using namespace emulate;
  Random random(1);
  for (u32 value = 1; value < 2000; ++value) check_divisor(value, random);
  for (int log2 = 11; log2 < 31; ++log2) {
    for (i64 more : {i64(-1), i64(0), i64(1), random.below(i64(1) << log2)}) {
      check_divisor(static_cast<u32>((i64(1) << log2) + more), random);
    }
  }
#ifdef SWEEP_FEW
  const std::vector<MergeKernel> list = list_of<FEW_KERNELS>();
  constexpr int kRuns = 60;
#else
  const std::vector<MergeKernel> list = list_of<ALL_KERNELS>();
  constexpr int kRuns = 100;
#endif
  int first_seed = 0;
  for (const MergeKernel& kernel : list) {
    rounds(kernel.name(), kRuns, [&](Random& random, int) { one_run(kernel, random); }, first_seed);
    first_seed += kRuns;
  }
}
