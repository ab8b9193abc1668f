// Parameters of the kernels that consume a DescriptorRing; both/ring.h describes its protocol.
#pragma once

#include <jitkern/both/ring.h>

#include "unpack.h"

namespace jitkern {

// The progress of a ring's consumers, in device memory. Starts as zeros; only the owner writes it.
struct RingState {
  u64 owner;        // the call that consumes, 0: none
  u64 generations;  // completed in the slots from `slot` on; earlier slots have one more
  u32 slot;         // the slot of the next push
};

// How the blocks of a call wait for each other, in device memory; zeros between calls.
struct RingBoard {
  u64 control;      // see ring_control; 0 until the first block has staged all descriptors
  u32 num_arrived;  // other blocks that have finished their copies
};

// The number of staged descriptors, and whether one of them is long.
JITKERN_HOST_DEVICE constexpr u64 ring_control(u32 count, bool has_long) {
  return u64(count) << 2 | u64(has_long) << 1 | 1;
}
JITKERN_HOST_DEVICE constexpr u32 control_count(u64 control) {
  return static_cast<u32>(control >> 2);
}
JITKERN_HOST_DEVICE constexpr bool control_has_long(u64 control) { return control >> 1 & 1; }

struct RingParams {
  RingHeader ring;
  const char* base;  // the ring, as kernels read it
  char* dones;       // completion words, in host memory
  RingState* state;
  u64 call;  // a number that no other call has
  FaultSite busy;
  FaultSite broken;  // a producer did not keep to the protocol
  FaultRecord* fault;
};

// Parameters of a call that takes the pushes that are present.
struct ConsumeParams {
  RingParams ring;
  UnpackParams unpack;
  RingBoard* board;
  Descriptor* staged;
  u32 most;  // the most pushes to take
};

// Parameters of a kernel that consumes until it is stopped.
struct ServeParams {
  RingParams ring;
  UnpackParams unpack;
  const u32* stop;  // in host memory: 1 asks it to end
  u64 idle_ns;      // the longest wait for a push
};

// The position of a ring's descriptor in faults.
JITKERN_HOST_DEVICE constexpr i64 ring_position(u32 slot, u32 descriptor) {
  return static_cast<i64>(slot) << 32 | descriptor;
}

}  // namespace jitkern
