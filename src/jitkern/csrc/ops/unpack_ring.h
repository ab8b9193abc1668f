// Parameters of the kernels that consume a DescriptorRing, whose protocol both/ring.h says.
#pragma once

#include <jitkern/both/ring.h>

#include "unpack.h"

namespace jitkern {

// What consumers of a ring leave to each other, in device memory. Starts as zeros; only the call
// that owns it writes it.
struct RingState {
  u64 owner;        // the call that consumes, 0: none
  u64 generations;  // that are over in the slots from `slot` on; one more in those before
  u32 slot;         // of the push that is next in turn
};

// Where the blocks of a call meet, in device memory; zeros between calls.
struct RingBoard {
  u64 control;      // see below; 0 until the first block knows what there is to do
  u32 num_arrived;  // other blocks that have copied all that was theirs
};

// All descriptors are in device memory: how many they are, and whether one of them is long.
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
  FaultSite broken;  // where a producer has not kept to the protocol
  FaultRecord* fault;
};

// Of a call that takes what is there.
struct ConsumeParams {
  RingParams ring;
  UnpackParams unpack;
  RingBoard* board;
  Descriptor* staged;
  u32 most;  // pushes
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
