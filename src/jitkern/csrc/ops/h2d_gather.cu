// h2d_gather on the device. Small calls are one launch of H2DGather over the pairs. Large ones sort
// the pairs first, so that each distinct source row is left to one fetch over PCIe, in the order of
// a large pool, and run H2DGather once more behind: on all SMs it copies the repeats in device
// memory, 80 times as fast as the bus.
#include "pairs.cuh"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using H2DGather = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes, kLineAligned,
                           kLarge, kInFlight, kHostSource>;

}  // namespace jitkern
