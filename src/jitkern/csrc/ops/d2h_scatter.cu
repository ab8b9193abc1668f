// d2h_scatter on the device: rows of device memory are written to pinned host memory, by large
// calls into a large pool in the order of its memory.
#include "pairs.cuh"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
using D2HScatter = PairCopy<kRowBytes, kThreads, kMaxOccupancy, kVecBytes, kIndexBytes,
                            kLineAligned, kLarge, kInFlight, kHostTarget>;

}  // namespace jitkern
