// Barriers, warp operations and groups of blocks of cuda_on_cpu.h: every thread is a fiber.
#include <sanitizer/asan_interface.h>

#include <memory>
#include <numeric>

#include "cuda_on_cpu.h"

// Leaves this stack for another one. swapcontext does as much, but makes a system call each time,
// and AddressSanitizer has it clear what it knows of 64 KB of stack: two thirds of the time of
// kernels that talk.
extern "C" void emulate_switch(void** left, void* entered);
asm(R"(
.text
.type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulate {

void die(const char* what) {
  std::fprintf(stderr, "emulate: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

namespace {

constexpr size_t kStackBytes = 64 << 10;

// Where a stack was left: at its top are the registers, and behind them where to go on.
using Context = void*;
Context prepare(char* stack, void (*begin)()) {
  constexpr size_t kSaved = 6;
  void** const top = reinterpret_cast<void**>(stack + kStackBytes) - kSaved - 2;
  std::fill_n(top, kSaved + 2, nullptr);
  top[kSaved] = reinterpret_cast<void*>(begin);
  return top;
}

struct Exchange {
  unsigned mask = 0;
  unsigned arrived = 0;
  unsigned is_open = 1;
  uint64_t values[32] = {};
};

// The operations of a warp that not all lanes of their mask have come to. There may be several, as
// lanes that went different ways use different masks.
using Warp = std::vector<std::shared_ptr<Exchange>>;

// Two barriers follow each other without mixing because each has a number of its own.
struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
  unsigned released_in = 0;  // the pass in which the last thread came
  int sums[2] = {0, 0};
};

struct Block {
  dim3 index;
  std::vector<Warp> warps;
  Barrier barrier;
  std::unique_ptr<char[]> shared;
  bool has_started = false;
  unsigned num_done = 0;  // threads
};

struct Fiber {
  Context context = nullptr;
  char* stack = nullptr;
  dim3 index;
  unsigned number = 0;  // in its block
  Block* block = nullptr;
  void* fake_stack = nullptr;
  // It has no turn as long as this word is what it was.
  const unsigned* waits_at = nullptr;
  unsigned waits_while = 0;
  unsigned cluster_generation = 0;  // when it arrived
  bool has_arrived = false;         // at the barrier of the cluster
  bool done = false;

  bool waits() const { return waits_at != nullptr && *waits_at == waits_while; }
};

// Blocks that run at the same time.
struct Group {
  Context scheduler = nullptr;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
  Barrier barrier;
  unsigned pass = 0;
  Fiber* current = nullptr;
  bool progress = false;  // since the last look: something came together
  const std::function<void()>* thread = nullptr;
};

Group* group = nullptr;

unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }

// Stacks are kept from group to group, as making one takes longer than running most threads.
char* stack_of(unsigned fiber) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  // Not make_unique, which fills with zeros: of 4,096 stacks most pages are never used.
  while (stacks.size() <= fiber) stacks.emplace_back(new char[kStackBytes]);
  ASAN_UNPOISON_MEMORY_REGION(stacks[fiber].get(), kStackBytes);
  return stacks[fiber].get();
}

void yield_to_scheduler() {
  Fiber& fiber = *group->current;
  __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fiber.fake_stack, group->stack_bottom,
                                 group->stack_bytes);
  emulate_switch(&fiber.context, group->scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

void wait_while(const unsigned& word, unsigned value) {
  Fiber& fiber = *group->current;
  fiber.waits_at = &word;
  fiber.waits_while = value;
  while (fiber.waits()) yield_to_scheduler();
  fiber.waits_at = nullptr;
}

void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &group->stack_bottom, &group->stack_bytes);
  Fiber& fiber = *group->current;
  (*group->thread)();
  fiber.done = true;
  ++fiber.block->num_done;
  group->progress = true;
  yield_to_scheduler();
}

void resume(Fiber& fiber) {
  group->current = &fiber;
  fiber.block->has_started = true;
  blockIdx = fiber.block->index;
  threadIdx = fiber.index;
  __sanitizer_start_switch_fiber(&group->fake_stack, fiber.stack, kStackBytes);
  emulate_switch(&group->scheduler, fiber.context);
  __sanitizer_finish_switch_fiber(group->fake_stack, nullptr, nullptr);
}

dim3 index_of(unsigned number, dim3 size) {
  return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

// Whether a warp has no turn: half of them, for 16 to 256 passes after each barrier.
bool is_slow(const Block& block, unsigned warp) {
  const Barrier &own = block.barrier, &all = group->barrier;
  const unsigned hash = (warp + own.generation + 5 * all.generation + 1) * 0x9e3779b1u;
  const unsigned passes = group->pass - std::max(own.released_in, all.released_in);
  return hash >> 31 != 0 && passes < 16u << (hash >> 16) % 5;
}

void run_group(unsigned first_block, unsigned num_blocks, Order order,
               const std::function<void()>& thread) {
  const unsigned threads = threads_of_block();
  Group here;
  here.blocks.resize(num_blocks);
  here.fibers.resize(num_blocks * threads);
  here.thread = &thread;
  group = &here;
  for (unsigned b = 0; b < num_blocks; ++b) {
    here.blocks[b].index = index_of(first_block + b, gridDim);
    here.blocks[b].warps.resize((threads + 31) / 32);
    here.blocks[b].shared = std::make_unique<char[]>(num_shared_bytes);
    std::fill_n(here.blocks[b].shared.get(), num_shared_bytes, char(0x5a));
  }
  for (unsigned f = 0; f < here.fibers.size(); ++f) {
    Fiber& fiber = here.fibers[f];
    fiber.block = &here.blocks[f / threads];
    fiber.number = f % threads;
    fiber.index = index_of(fiber.number, blockDim);
    fiber.stack = stack_of(f);
    fiber.context = prepare(fiber.stack, fiber_main);
  }
  const std::vector<unsigned> order_of_turns = turns(num_blocks * threads, order);
  for (size_t done = 0; done < here.fibers.size(); ++here.pass) {
    done = 0;
    here.progress = false;
    for (const unsigned f : order_of_turns) {
      Fiber& fiber = here.fibers[f];
      if (order == Order::kUneven && is_slow(*fiber.block, f / 32)) {
        here.progress = true;
      } else if (!fiber.done && !fiber.waits()) {
        resume(fiber);
      }
      done += fiber.done;
    }
    if (!here.progress) die("a barrier or warp operation that not every thread came to");
  }
  group = nullptr;
}

}  // namespace

unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

void block_barrier(int* sum, int value) {
  Barrier& barrier = group->current->block->barrier;
  const unsigned generation = barrier.generation;
  barrier.sums[generation % 2] += value;
  if (++barrier.arrived == threads_of_block()) {
    barrier.arrived = 0;
    barrier.sums[(generation + 1) % 2] = 0;
    ++barrier.generation;
    barrier.released_in = group->pass;
    group->progress = true;
  }
  wait_while(barrier.generation, generation);
  if (sum != nullptr) *sum = barrier.sums[generation % 2];
}

char* shared_memory() { return group->current->block->shared.get(); }

Cluster Cluster::here() {
  const auto rank = group->current->block - group->blocks.data();
  return {static_cast<unsigned>(rank), static_cast<unsigned>(group->blocks.size())};
}

void Cluster::arrive() const {
  Fiber& fiber = *group->current;
  Barrier& barrier = group->barrier;
  if (fiber.has_arrived) die("a thread that arrives at the cluster's barrier twice");
  fiber.has_arrived = true;
  fiber.cluster_generation = barrier.generation;
  if (++barrier.arrived < group->fibers.size()) return;
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.released_in = group->pass;
  group->progress = true;
}

void Cluster::wait() const {
  Fiber& fiber = *group->current;
  if (!fiber.has_arrived) die("a thread that waits for the cluster and has not arrived");
  wait_while(group->barrier.generation, fiber.cluster_generation);
  fiber.has_arrived = false;
}

char* Cluster::memory_of(unsigned block) {
  const Block& other = group->blocks.at(block);
  if (!other.has_started) die("shared memory of a block that has not started");
  if (other.num_done == threads_of_block()) die("shared memory of a block that has ended");
  return other.shared.get();
}

void let_others_run() {
  group->progress = true;
  yield_to_scheduler();
}

void warp_exchange(unsigned mask, uint64_t value, uint64_t values[32]) {
  Fiber& fiber = *group->current;
  const unsigned self = 1u << lane();
  if (!(mask & self)) die("a warp operation whose mask leaves out the calling lane");
  Warp& open = fiber.block->warps[fiber.number / 32];
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
    exchange->is_open = 0;
    open.erase(std::find(open.begin(), open.end(), exchange));
    group->progress = true;
  }
  wait_while(exchange->is_open, 1);
  std::memcpy(values, exchange->values, sizeof(exchange->values));
}

std::vector<unsigned> turns(unsigned count, Order order) {
  std::vector<unsigned> order_of_turns(count);
  std::iota(order_of_turns.begin(), order_of_turns.end(), 0u);
  if (order == Order::kReverse) std::reverse(order_of_turns.begin(), order_of_turns.end());
  if (order == Order::kShuffled || order == Order::kUneven) {
    uint64_t state = count;
    for (unsigned i = count; i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(order_of_turns[i - 1], order_of_turns[(state >> 33) % i]);
    }
  }
  return order_of_turns;
}

void launch_groups(dim3 grid, dim3 block_size, unsigned group_size, Order order,
                   const std::function<void()>& thread) {
  gridDim = grid;
  blockDim = block_size;
  for (const unsigned c : turns(grid.x * grid.y * grid.z / group_size, order)) {
    run_group(c * group_size, group_size, order, thread);
  }
}

}  // namespace emulate
