// Thread block clusters (compute capability 9.0 and up): blocks that run at the same time, share
// barriers and read each other's shared memory. The launch sets the number of blocks in a cluster.
// Without it, and on older GPUs, each block is a cluster of its own.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// This block's instance of a type in shared memory; a kernel has one for each T.
template <class T>
__device__ inline T& own_shared() {
  __shared__ T shared;
  return shared;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The rank of this block in its cluster, and the number of blocks.
__device__ inline u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// A barrier of all threads of the cluster in two halves. After the wait they see what any thread
// wrote to shared or global memory before it arrived. Between the halves a thread may work, but not
// use another barrier of the cluster. A kernel ends with a barrier, so that no block returns while
// others read its shared memory.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline u64 address_of_block(u64 address, u32 rank) {
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(address), "r"(rank));
  return address;
}

#else

__device__ inline u32 cluster_rank() { return 0; }
__device__ inline u32 cluster_size() { return 1; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() { __syncthreads(); }
__device__ inline u64 address_of_block(u64 address, u32) { return address; }

#endif

__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The object of another block of the cluster that corresponds to `own`, an object in shared memory
// or a part of one. That block must have started, which a barrier ensures, and not returned.
template <class T>
__device__ inline T& of_block(T& own, u32 rank) {
  return *reinterpret_cast<T*>(address_of_block(reinterpret_cast<u64>(&own), rank));
}

}  // namespace jitkern
