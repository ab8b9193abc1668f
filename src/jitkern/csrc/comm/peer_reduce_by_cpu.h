// What the kernels of peer_reduce.cu do, by one thread of a process, over memory that processes
// share.
#pragma once

#include "comm/peer_reduce.h"

namespace jitkern {

// What became of a call.
struct PeerResult {
  enum Kind { kDone, kBroken, kLate, kInterrupted } kind;
  u32 missing = 0;  // ranks, as bits
};

// `way`, `type` and `num_blocks` are what a GPU has compiled in, or is launched with; `params` has
// no fault words. `is_interrupted` is asked now and then. Not done, the workspace is broken.
PeerResult peer_reduce_by_cpu(const PeerReduceParams& params, PeerWay way, int type, u32 num_blocks,
                              bool (*is_interrupted)());

}  // namespace jitkern
