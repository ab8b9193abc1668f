// CUDA's device language on the host, as far as the kernels use it, so that a sanitizer can watch
// them. `g++ -include cuda_on_cpu.h` compiles a .cu as it is.
//
// Blocks run one after the other, their threads take turns at every barrier and warp operation
// (`launch_fibers`). Blocks that wait for each other take turns as well (`launch_groups`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define JITKERN_EMULATED  // asked for where a header says in PTX what CUDA has no function for

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __shared__ static  // blocks run one after the other

// Aligned as on the device, so that UBSan's alignment check means the same here as a trap there.
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

// ---- memory ----------------------------------------------------------------------------------

namespace emulate {
// Called at each fence, and after that at a fence of the whole system.
inline std::function<void()> on_fence, on_system_fence;
}  // namespace emulate

inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (emulate::on_fence) emulate::on_fence();
}
inline void __threadfence_system() {
  __threadfence();
  if (emulate::on_system_fence) emulate::on_system_fence();
}

template <class T>
inline T atomicCAS(T* p, T expected, T desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
inline T atomicAdd(T* p, T value) {
  return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicOr(T* p, T value) {
  return __atomic_fetch_or(p, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicMin(T* p, T value) {
  const T before = *p;
  *p = std::min(before, value);
  return before;
}

// ---- bits ------------------------------------------------------------------------------------

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- memory that others write (ops/system_memory.cuh) ----------------------------------------

namespace emulate {

[[noreturn]] void die(const char* what);

// Called in front of each load of such memory, and may write to it: as a producer does at that very
// moment. Lanes that load together on a GPU do so one after the other here, so it is called for
// each.
inline std::function<void()> on_fresh_load;

// UBSan does not look at the addresses of the compiler's atomics.
template <class T>
T* aligned(T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) die("misaligned address");
  return at;
}

template <class T>
T load_system(const T* from) {
  if (on_fresh_load) on_fresh_load();
  return __atomic_load_n(aligned(from), __ATOMIC_ACQUIRE);
}
// Of words that are loaded one by one, as PTX promises no more.
inline uint4 load_system(const uint4* from) {
  if (on_fresh_load) on_fresh_load();
  aligned(from);
  const auto word = [](const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); };
  return {word(&from->x), word(&from->y), word(&from->z), word(&from->w)};
}

// Stores a vector word by word. `store_vector` may delay the words.
inline std::function<void(uint4*, const uint4&)> store_vector;
inline void store_system(uint4* to, const uint4& value) {
  aligned(to);
  if (store_vector) return store_vector(to, value);
  const auto word = [](unsigned* at, unsigned bits) {
    __atomic_store_n(at, bits, __ATOMIC_RELEASE);
  };
  word(&to->x, value.x), word(&to->y, value.y), word(&to->z, value.z), word(&to->w, value.w);
}

// Programmatic dependent launch (pdl.cuh): kernels run one after the other, unless a test has them
// overlap.
inline std::function<void()> on_wait_for_kernels;
inline std::function<void()> on_let_kernel_start;
inline void wait_for_earlier_kernels() {
  if (on_wait_for_kernels) on_wait_for_kernels();
}
inline void let_next_kernel_start() {
  if (on_let_kernel_start) on_let_kernel_start();
}

// A clock that goes on when it is read, so that whoever waits for nothing comes to an end.
constexpr unsigned long long kNanosecondsEach = 1000;
inline unsigned long long nanoseconds() {
  static unsigned long long now = 0;
  return now += kNanosecondsEach;
}

}  // namespace emulate

// ---- barriers, warps and groups of blocks (fibers.cc)
// ------------------------------------------------

namespace emulate {

// In which order the blocks, and the threads of a block, have their turn. kUneven: shuffled, and
// some warps have none for a while after each barrier, so that others come far ahead of them.
enum class Order { kForward, kReverse, kShuffled, kUneven };

unsigned lane();
void block_barrier(int* sum, int value);

// All lanes of `mask` bring 8 bytes each; `values[32]` are those of the whole warp.
void warp_exchange(unsigned mask, uint64_t value, uint64_t values[32]);

// The same order on every run, another one for every `count`.
std::vector<unsigned> turns(unsigned count, Order order);

// Runs threads as fibers that change at barriers and warp operations. A barrier that not every
// thread reaches, or a warp operation that a lane of its mask misses, ends the process. Groups of
// `group_size` neighbouring blocks run at the same time; `order` is the order of all their threads.
void launch_groups(dim3 grid, dim3 block, unsigned group_size, Order order,
                   const std::function<void()>& thread);
inline void launch_fibers(dim3 grid, dim3 block, Order order, const std::function<void()>& thread) {
  launch_groups(grid, block, 1, order, thread);
}
// The dynamic shared memory of the thread's block: so many bytes, which hold anything at first.
inline size_t num_shared_bytes = 0;
char* shared_memory();

// The blocks of a group as a cluster: see offload/cluster.cuh.
struct Cluster {
  unsigned rank;
  unsigned size;

  static Cluster here();
  void arrive() const;
  void wait() const;
  void sync() const {
    arrive();
    wait();
  }
  // Of a block that has started and not ended.
  template <class T>
  T* peer(T* own, unsigned block) const {
    return reinterpret_cast<T*>(memory_of(block) +
                                (reinterpret_cast<char*>(own) - shared_memory()));
  }

 private:
  static char* memory_of(unsigned block);
};

// For on_fresh_load: all other fibers have a turn, as if a GPU were slow with this thread.
void let_others_run();

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// `source` outside the lane's segment of `width` lanes means the lane's own value.
template <class T, class Source>
T shuffle(unsigned mask, T value, int width, Source source) {
  uint64_t values[32];
  warp_exchange(mask, to_word(value), values);
  const int self = static_cast<int>(lane());
  const int begin = self / width * width;
  const int from = source(self, begin);
  if (from < begin || from >= begin + width) return value;
  if (!(mask >> from & 1)) {
    std::fprintf(stderr, "emulate: lane %d shuffles from lane %d outside its mask\n", self, from);
    std::abort();
  }
  return from_word<T>(values[from]);
}

}  // namespace emulate

inline void __syncthreads() { emulate::block_barrier(nullptr, 0); }
inline int __syncthreads_count(int predicate) {
  int sum = 0;
  emulate::block_barrier(&sum, predicate != 0);
  return sum;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  uint64_t values[32];
  emulate::warp_exchange(mask, 0, values);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  uint64_t values[32];
  emulate::warp_exchange(mask, predicate != 0, values);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && values[i] != 0) ballot |= 1u << i;
  }
  return ballot;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emulate::shuffle(mask, value, width,
                          [=](int, int begin) { return begin + (from & (width - 1)); });
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulate::shuffle(mask, value, width,
                          [=](int self, int) { return self - static_cast<int>(delta); });
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return emulate::shuffle(mask, value, width, [=](int self, int) { return self ^ bits; });
}
