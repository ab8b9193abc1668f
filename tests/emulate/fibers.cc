// Barriers and warp operations of cuda_on_cpu.h: every thread of a block is a fiber.
#include <sanitizer/asan_interface.h>
#include <ucontext.h>

#include <memory>
#include <numeric>

#include "cuda_on_cpu.h"

namespace emulate {

namespace {

constexpr size_t kStackBytes = 64 << 10;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "emulate: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

struct Exchange {
  unsigned mask = 0;
  unsigned arrived = 0;
  uint64_t values[32] = {};
};

// The operations of a warp that not all lanes of their mask have come to. There may be several, as
// lanes that went different ways use different masks.
using Warp = std::vector<std::shared_ptr<Exchange>>;

struct Fiber {
  ucontext_t context;
  char* stack = nullptr;
  dim3 index;
  void* fake_stack = nullptr;
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned current = 0;
  bool progress = false;  // since the last look: something came together
  // Two barriers follow each other without mixing because each has a number of its own.
  unsigned arrived = 0;
  unsigned generation = 0;
  int sums[2] = {0, 0};
  const std::function<void()>* thread = nullptr;
};

Block* block = nullptr;

// Stacks are kept from block to block, as making one takes longer than running most threads.
char* stack_of(unsigned thread) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= thread) stacks.push_back(std::make_unique<char[]>(kStackBytes));
  ASAN_UNPOISON_MEMORY_REGION(stacks[thread].get(), kStackBytes);
  return stacks[thread].get();
}

void yield_to_scheduler() {
  Fiber& fiber = block->fibers[block->current];
  __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fiber.fake_stack, block->stack_bottom,
                                 block->stack_bytes);
  swapcontext(&fiber.context, &block->scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &block->stack_bottom, &block->stack_bytes);
  (*block->thread)();
  block->fibers[block->current].done = true;
  block->progress = true;
  yield_to_scheduler();
}

void prepare(Fiber& fiber, char* stack) {
  fiber.stack = stack;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

void resume(unsigned t) {
  Fiber& fiber = block->fibers[t];
  block->current = t;
  threadIdx = fiber.index;
  __sanitizer_start_switch_fiber(&block->fake_stack, fiber.stack, kStackBytes);
  swapcontext(&block->scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(block->fake_stack, nullptr, nullptr);
}

void run_block(dim3 size, Order order, const std::function<void()>& thread) {
  const unsigned count = size.x * size.y * size.z;
  Block here;
  here.fibers.resize(count);
  here.warps.resize((count + 31) / 32);
  here.thread = &thread;
  block = &here;
  for (unsigned t = 0; t < count; ++t) {
    Fiber& fiber = here.fibers[t];
    fiber.index = {t % size.x, t / size.x % size.y, t / size.x / size.y};
    prepare(fiber, stack_of(t));
  }
  const std::vector<unsigned> order_of_turns = turns(count, order);
  for (unsigned done = 0; done < count;) {
    done = 0;
    here.progress = false;
    for (const unsigned t : order_of_turns) {
      if (!here.fibers[t].done) resume(t);
      done += here.fibers[t].done;
    }
    if (!here.progress) die("a barrier or warp operation that not every thread came to");
  }
  block = nullptr;
}

}  // namespace

unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

void block_barrier(int* sum, int value) {
  if (block == nullptr) die("a barrier in a kernel that was started without fibers");
  const unsigned generation = block->generation;
  int& total = block->sums[generation % 2];
  total += value;
  if (++block->arrived == block->fibers.size()) {
    block->arrived = 0;
    block->sums[(generation + 1) % 2] = 0;
    ++block->generation;
    block->progress = true;
  }
  while (block->generation == generation) yield_to_scheduler();
  if (sum != nullptr) *sum = total;
}

void warp_exchange(unsigned mask, uint64_t value, uint64_t values[32]) {
  if (block == nullptr) die("a warp operation in a kernel that was started without fibers");
  const unsigned self = 1u << lane();
  if (!(mask & self)) die("a warp operation whose mask leaves out the calling lane");
  Warp& open = block->warps[block->current / 32];
  std::shared_ptr<Exchange> exchange;
  for (const auto& other : open) {
    if (other->mask == mask) exchange = other;
  }
  if (exchange == nullptr) {
    exchange = std::make_shared<Exchange>();
    exchange->mask = mask;
    open.push_back(exchange);
  }
  exchange->values[lane()] = value;
  exchange->arrived |= self;
  if (exchange->arrived == mask) {
    open.erase(std::find(open.begin(), open.end(), exchange));
    block->progress = true;
  }
  while (exchange->arrived != mask) yield_to_scheduler();
  std::memcpy(values, exchange->values, sizeof(exchange->values));
}

std::vector<unsigned> turns(unsigned count, Order order) {
  std::vector<unsigned> order_of_turns(count);
  std::iota(order_of_turns.begin(), order_of_turns.end(), 0u);
  if (order == Order::kReverse) std::reverse(order_of_turns.begin(), order_of_turns.end());
  if (order == Order::kShuffled) {
    uint64_t state = count;
    for (unsigned i = count; i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(order_of_turns[i - 1], order_of_turns[(state >> 33) % i]);
    }
  }
  return order_of_turns;
}

void launch_fibers(dim3 grid, dim3 block_size, Order order, const std::function<void()>& thread) {
  gridDim = grid;
  blockDim = block_size;
  for (const unsigned b : turns(grid.x * grid.y * grid.z, order)) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    run_block(block_size, order, thread);
  }
}

}  // namespace emulate
