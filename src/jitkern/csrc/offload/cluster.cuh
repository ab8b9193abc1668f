// A cluster of blocks (compute capability 9.0 and up), which see each other's shared memory.
// Elsewhere each block is alone.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

#ifdef JITKERN_EMULATED
using emulate::Cluster;
using emulate::shared_memory;
#else

// The block's dynamic shared memory.
__device__ inline char* shared_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<char*>(memory);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Cluster {
  u32 rank;  // this block's
  u32 size;

  static __device__ Cluster here() {
    Cluster cluster;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(cluster.rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(cluster.size));
    return cluster;
  }
  // A barrier of all threads of the cluster, in two steps. What they wrote before it, to global or
  // to anyone's shared memory, is seen after it.
  __device__ void arrive() const {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ void wait() const {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  __device__ void sync() const {
    arrive();
    wait();
  }
  // The same place in the shared memory of another block, which must have started.
  template <class T>
  __device__ T* peer(T* own, u32 block) const {
    u64 address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(block));
    return reinterpret_cast<T*>(address);
  }
};

#else

struct Cluster {
  static constexpr u32 rank = 0, size = 1;

  static __device__ Cluster here() { return {}; }
  __device__ void arrive() const {}
  __device__ void wait() const { __syncthreads(); }
  __device__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ T* peer(T* own, u32) const {
    return own;
  }
};

#endif
#endif

}  // namespace jitkern
