// Thread block clusters (compute capability 9.0 and up): blocks that run at the same time, wait for
// each other at barriers and read each other's shared memory. How many they are, the launch says.
// Elsewhere, and where it says nothing, a block is a cluster of its own.
#pragma once

#include <jitkern/types.h>

#if defined(JITKERN_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define JITKERN_CLUSTERS 1
#endif

namespace jitkern {

// The number of this block in its cluster, and of how many.
__device__ inline u32 cluster_rank() {
#ifdef JITKERN_EMULATED
  return emulate::cluster_rank();
#else
  u32 rank = 0;
#ifdef JITKERN_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
#endif
}

__device__ inline u32 cluster_size() {
#ifdef JITKERN_EMULATED
  return emulate::cluster_size();
#else
  u32 size = 1;
#ifdef JITKERN_CLUSTERS
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
#endif
}

// A barrier of all threads of the cluster in two halves: what any of them wrote in front of the
// first, to shared or to global memory, all see behind the second. Between them a thread may work,
// but not come to another barrier of the cluster. A block must not return before the others have
// read what is in its shared memory: this is what the last barrier of a kernel is for.
__device__ inline void cluster_arrive() {
#ifdef JITKERN_EMULATED
  emulate::cluster_arrive();
#elif defined(JITKERN_CLUSTERS)
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#ifdef JITKERN_EMULATED
  emulate::cluster_wait();
#elif defined(JITKERN_CLUSTERS)
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// This block's instance of a type in shared memory: there is one for each T in a kernel.
template <class T>
__device__ inline T& own_shared() {
#ifdef JITKERN_EMULATED
  return emulate::own_shared<T>();
#else
  __shared__ T shared;
  return shared;
#endif
}

// The same of another block of the cluster; `own` may be a part of an instance. Whoever reads or
// writes it must know that the block has begun, as it has behind a barrier, and not returned.
template <class T>
__device__ inline T& of_block(T& own, u32 rank) {
  u64 address = reinterpret_cast<u64>(&own);
#ifdef JITKERN_EMULATED
  address = emulate::shared_of_block(address, rank);
#elif defined(JITKERN_CLUSTERS)
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(address), "r"(rank));
#endif
  return *reinterpret_cast<T*>(address);
}

}  // namespace jitkern
