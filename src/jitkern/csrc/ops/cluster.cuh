// Thread block clusters (compute capability 9.0 and up): blocks that run at the same time, wait for
// each other at barriers and read each other's shared memory. Kernels take the number of blocks as
// a template argument; with 1 they compile for every device and do what a block does on its own.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// The number of this block in its cluster, and of how many.
__device__ inline u32 cluster_rank() {
#ifdef JITKERN_EMULATED
  return emulate::cluster_rank();
#else
  u32 rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
#endif
}

template <u32 kSize>
__device__ constexpr bool has_clusters() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return kSize == 1;
#else
  return kSize >= 1 && kSize <= 16;  // more than 8 only where a kernel says that it may
#endif
}

// A barrier of all threads of the cluster. What any of them wrote in front of it, to shared or to
// global memory, all see behind it. A block must not return before the others have read what is in
// its shared memory: this is what the last barrier of a kernel is for.
template <u32 kSize>
__device__ inline void cluster_sync() {
  static_assert(has_clusters<kSize>(),
                "clusters have up to 16 blocks, from compute capability 9.0 on");
  if constexpr (kSize == 1) {
    __syncthreads();
  } else {
#ifdef JITKERN_EMULATED
    emulate::cluster_barrier(kSize);
#else
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
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
// writes it must know that the block has begun, as it has behind a cluster_sync, and not returned.
template <u32 kSize, class T>
__device__ inline T& of_block(T& own, u32 rank) {
  static_assert(has_clusters<kSize>(),
                "clusters have up to 16 blocks, from compute capability 9.0 on");
  if constexpr (kSize == 1) {
    return own;
  } else {
    u64 address = reinterpret_cast<u64>(&own);
#ifdef JITKERN_EMULATED
    address = emulate::shared_of_block(address, rank);
#else
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(address), "r"(rank));
#endif
    return *reinterpret_cast<T*>(address);
  }
}

}  // namespace jitkern
