// A call of a PeerReducer: its tensors, checked, and how they are cut.
#pragma once

#include <jitkern/check.h>

#include <vector>

#include "comm/peer_reduce.h"

namespace jitkern {

// Up to so many bytes of the longest part: blocks, and threads of each.
struct PeerShape {
  i64 most_bytes;
  u32 blocks;
  u32 threads;
};

// What all calls of a reducer have in common.
struct PeerPlan {
  int ordinal;  // of the GPU; -1: the CPU
  int rank;
  PeerSlots slots;
  std::vector<PeerShape> shapes;  // the last one of any size
  i64 one_shot_bytes;             // up to so many "auto" is one shot
};

struct PeerCall {
  PeerWay way;
  int type;
  i64 access_bytes;  // the widest that both tensors allow
  u32 num_blocks;
  u32 num_threads;
  PeerReduceParams params{};  // of the tensors, and of how they are cut

  // No items: there is nothing to do.
  bool is_empty() const { return params.num_vecs == 0; }
  // A thread has more than one vector.
  bool has_several(u32 threads) const {
    const u32 most = params.blocks.share(0).count;
    return (most < params.slots.vecs ? most : params.slots.vecs) > threads;
  }
};

// `out` is none where it is x; `way` is a PeerWay, or -1: by size.
PeerCall all_reduce_call(const PeerPlan& plan, AnyView x, AnyView out, i64 way);
PeerCall reduce_scatter_call(const PeerPlan& plan, AnyView output, AnyView x);
PeerCall meet_call(const PeerPlan& plan);

}  // namespace jitkern
