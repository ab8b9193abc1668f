// d2h_scatter on the device: rows of device memory are written to pinned host memory.
#include <jitkern/pair_copy.cuh>

namespace jitkern {

template <i64 kRowBytes, int kVecBytes, int kIndexBytes, bool kLineAligned, int kInFlight,
          int kThreads, int kMaxOccupancy>
using D2HScatter = PairCopy<kRowBytes, kVecBytes, kIndexBytes, kLineAligned, kInFlight, kHostTarget,
                            kThreads, kMaxOccupancy>;

}  // namespace jitkern
