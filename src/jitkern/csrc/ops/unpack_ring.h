// Parameters of the kernels that consume a DescriptorRing, whose protocol both/ring.h says.
#pragma once

#include <jitkern/both/ring.h>

#include "unpack.h"

namespace jitkern {

// What the consumers of a ring leave to each other, in device memory. It begins as zeros, and is
// written by one call at a time: the one that owns it.
struct RingState {
  u64 owner;            // the call that consumes, 0: none
  u64 generations;      // that are over in the slots from `slot` on; one more in those in front
  u32 slot;             // of the push that is next in turn
  u32 num_taken;        // pushes of the owner
  i64 num_descriptors;  // and descriptors that it has staged
};

// A push that a call has taken.
struct RingPush {
  u64 generation;
  u32 slot;
};

struct RingParams {
  RingHeader ring;
  const char* base;  // the ring, as kernels read it
  char* host;        // and where its completion words are
  RingState* state;
  u64* consumed;  // by slot, the generation that was taken last
  RingPush* taken;
  Descriptor* staged;
  u64 call;          // a number that no other call has
  i64 slot;          // the first; below 0: that of the push that is next in turn
  u32 most;          // pushes
  FaultSite busy;    // where another call consumes
  FaultSite broken;  // where a producer has
  FaultRecord* fault;
};

// Of a kernel that consumes until it is stopped.
struct ServeParams {
  RingParams ring;
  UnpackParams unpack;
  const u32* stop;  // in host memory: 1 once it shall end
  u64 idle_ns;      // and how long it waits for a push
};

// What stands in for the index of a descriptor in faults.
JITKERN_HOST_DEVICE constexpr i64 ring_position(u32 slot, u32 descriptor) {
  return static_cast<i64>(slot) << 32 | descriptor;
}

}  // namespace jitkern
