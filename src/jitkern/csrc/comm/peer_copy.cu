// Copies rows for peer_gather, which reads a row once and writes it to the memory of every rank,
// and for peer_scatter.
#include "comm/peer_rows.h"
#include "ops/pairs.cuh"
#include "ops/system_memory.cuh"

namespace jitkern {

// Writes nothing if the barrier before it has failed: other ranks may be reading.
template <class Copy>
struct IfIntact : Copy {
  static __device__ void run(const PeerCopyParams& p) {
    if (load_fresh(p.intact) == kUnwritten) Copy::run(p);
  }
};

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using PeerGather = IfIntact<PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes,
                                     kLineAligned, kLarge, kInFlight, kHostSource, PeerCopyParams>>;

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using PeerScatter =
    IfIntact<PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes, kLineAligned,
                      kLarge, kInFlight, kHostTarget, PeerCopyParams>>;

}  // namespace jitkern
