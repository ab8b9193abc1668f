// Barriers, warp operations and clusters of cuda_on_cpu.h: every thread of a cluster is a fiber.
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
  int sums[2] = {0, 0};
};

// The instance of a type in a block's shared memory. Each is memory of its own, which can be read
// from when the block begins until it has returned: AddressSanitizer knows where it ends, and when.
struct Shared {
  const void* type;
  size_t bytes;
  size_t align;
  char* memory;

  // Aligned as the type asks for, and no more.
  char* start() const { return memory + align; }
};

struct Block {
  dim3 index;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<Shared> shared;
  unsigned begun = 0;  // threads
  unsigned done = 0;
};

struct Fiber {
  Context context = nullptr;
  char* stack = nullptr;
  dim3 index;
  unsigned number = 0;  // in its block
  Block* block = nullptr;
  void* fake_stack = nullptr;
  int64_t arrived_at = -1;  // the barrier of its cluster that it will wait at
  // It has no turn as long as this word is what it was.
  const unsigned* waits_at = nullptr;
  unsigned waits_while = 0;
  bool done = false;

  bool waits() const { return waits_at != nullptr && *waits_at == waits_while; }
};

struct Cluster {
  Context scheduler = nullptr;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
  Barrier barrier;
  Fiber* current = nullptr;
  bool progress = false;  // since the last look: something came together
  const std::function<void()>* thread = nullptr;
};

Cluster* cluster = nullptr;

unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }

// Stacks are kept from cluster to cluster, as making one takes longer than running most threads.
char* stack_of(unsigned fiber) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  // Not make_unique, which fills with zeros: of 4,096 stacks most pages are never used.
  while (stacks.size() <= fiber) stacks.emplace_back(new char[kStackBytes]);
  ASAN_UNPOISON_MEMORY_REGION(stacks[fiber].get(), kStackBytes);
  return stacks[fiber].get();
}

void yield_to_scheduler() {
  Fiber& fiber = *cluster->current;
  __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fiber.fake_stack, cluster->stack_bottom,
                                 cluster->stack_bytes);
  emulate_switch(&fiber.context, cluster->scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

void wait_while(const unsigned& word, unsigned value) {
  Fiber& fiber = *cluster->current;
  fiber.waits_at = &word;
  fiber.waits_while = value;
  while (fiber.waits()) yield_to_scheduler();
  fiber.waits_at = nullptr;
}

void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &cluster->stack_bottom, &cluster->stack_bytes);
  Fiber& fiber = *cluster->current;
  Block& block = *fiber.block;
  const bool is_first = ++block.begun == 1;
  for (const Shared& shared : block.shared) {
    if (is_first) ASAN_UNPOISON_MEMORY_REGION(shared.start(), shared.bytes);
  }
  (*cluster->thread)();
  fiber.done = true;
  const bool is_last = ++block.done == threads_of_block();
  for (const Shared& shared : block.shared) {
    if (is_last) std::free(shared.memory);
  }
  cluster->progress = true;
  yield_to_scheduler();
}

void resume(Fiber& fiber) {
  cluster->current = &fiber;
  blockIdx = fiber.block->index;
  threadIdx = fiber.index;
  __sanitizer_start_switch_fiber(&cluster->fake_stack, fiber.stack, kStackBytes);
  emulate_switch(&cluster->scheduler, fiber.context);
  __sanitizer_finish_switch_fiber(cluster->fake_stack, nullptr, nullptr);
}

dim3 index_of(unsigned number, dim3 size) {
  return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

void run_cluster(unsigned first_block, unsigned num_blocks, Order order,
                 const std::function<void()>& thread) {
  const unsigned threads = threads_of_block();
  Cluster here;
  here.blocks.resize(num_blocks);
  here.fibers.resize(num_blocks * threads);
  here.thread = &thread;
  cluster = &here;
  for (unsigned b = 0; b < num_blocks; ++b) {
    here.blocks[b].index = index_of(first_block + b, gridDim);
    here.blocks[b].warps.resize((threads + 31) / 32);
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
  for (size_t done = 0; done < here.fibers.size();) {
    done = 0;
    here.progress = false;
    for (const unsigned f : order_of_turns) {
      Fiber& fiber = here.fibers[f];
      if (!fiber.done && !fiber.waits()) resume(fiber);
      done += fiber.done;
    }
    if (!here.progress) die("a barrier or warp operation that not every thread came to");
  }
  cluster = nullptr;
}

// The number of the barrier that the thread has come to, as one of `threads`.
unsigned come_to(Barrier& barrier, size_t threads, int value) {
  const unsigned generation = barrier.generation;
  barrier.sums[generation % 2] += value;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.sums[(generation + 1) % 2] = 0;
    ++barrier.generation;
    cluster->progress = true;
  }
  return generation;
}

// Comes back when all have come to it, with the sum of what they brought.
int wait_at(const Barrier& barrier, unsigned generation) {
  wait_while(barrier.generation, generation);
  return barrier.sums[generation % 2];
}

// Where a block has its instance of a type. It is made where nobody asked for it before, and holds
// what no kernel takes for something of its own.
char* instance(Block& block, const void* type, size_t bytes, size_t align) {
  for (const Shared& shared : block.shared) {
    if (shared.type == type) return shared.start();
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(2 * align, sizeof(void*)), align + bytes) != 0) {
    die("out of memory");
  }
  std::memset(memory, 0xa5, align + bytes);
  ASAN_POISON_MEMORY_REGION(memory, block.begun > 0 ? align : align + bytes);
  if (block.done == threads_of_block()) std::free(memory);
  block.shared.push_back({type, bytes, align, static_cast<char*>(memory)});
  return block.shared.back().start();
}

}  // namespace

unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

void block_barrier(int* sum, int value) {
  Block& block = *cluster->current->block;
  const int total = wait_at(block.barrier, come_to(block.barrier, threads_of_block(), value));
  if (sum != nullptr) *sum = total;
}

void cluster_arrive() {
  Fiber& fiber = *cluster->current;
  if (fiber.arrived_at >= 0) die("arrives twice at a barrier of its cluster");
  fiber.arrived_at = come_to(cluster->barrier, cluster->fibers.size(), 0);
}

void cluster_wait() {
  Fiber& fiber = *cluster->current;
  if (fiber.arrived_at < 0) die("waits at a barrier that it has not come to");
  wait_at(cluster->barrier, static_cast<unsigned>(fiber.arrived_at));
  fiber.arrived_at = -1;
}

unsigned cluster_size() { return cluster->blocks.size(); }

unsigned cluster_rank() { return blockIdx.x % cluster_size(); }

void let_others_run() {
  cluster->progress = true;
  yield_to_scheduler();
}

void* own_shared(const void* type, size_t bytes, size_t align) {
  return instance(*cluster->current->block, type, bytes, align);
}

uint64_t shared_of_block(uint64_t address, unsigned rank) {
  Fiber& fiber = *cluster->current;
  if (rank >= cluster->blocks.size()) die("shared memory of a block that the cluster has not");
  for (const Shared& own : fiber.block->shared) {
    const uint64_t offset = address - reinterpret_cast<uint64_t>(own.start());
    if (offset >= own.bytes) continue;
    char* start = instance(cluster->blocks[rank], own.type, own.bytes, own.align);
    return reinterpret_cast<uint64_t>(start) + offset;
  }
  die("asked of another block what is not in own_shared of this one");
}

void warp_exchange(unsigned mask, uint64_t value, uint64_t values[32]) {
  Fiber& fiber = *cluster->current;
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
    cluster->progress = true;
  }
  wait_while(exchange->is_open, 1);
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

void launch_clusters(dim3 grid, dim3 block_size, unsigned cluster_size, Order order,
                     const std::function<void()>& thread) {
  gridDim = grid;
  blockDim = block_size;
  for (const unsigned c : turns(grid.x * grid.y * grid.z / cluster_size, order)) {
    run_cluster(c * cluster_size, cluster_size, order, thread);
  }
}

}  // namespace emulate
