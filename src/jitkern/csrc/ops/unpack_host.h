// A checked call of unpack, and its launch, which rings use too.
#pragma once

#include <vector>

#include "common.h"
#include "unpack.h"

namespace jitkern {

constexpr i64 kMostDescriptors = 1ll << 30;  // of one launch

struct UnpackSides {
  Rows src;  // as one row
  Rows dst;

  UnpackSides(AnyView src, AnyView dst);

  const Rows& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // ValueError if there are more bytes than the kernel can count.
  void check_sizes() const;
  // Addresses as the GPU has them, and sizes.
  UnpackParams params() const;
};

struct UnpackCall : UnpackSides {
  Indices descriptors;
  CountArg count;
  DescriptorFormat format;
  i64 num_descriptors;

  UnpackCall(AnyView src, AnyView dst, AnyView descriptors, AnyView count);

  // The descriptors on the CPU that count, simplified, each read once. IndexError for the first
  // that is out of range.
  std::vector<Pieces> checked_descriptors() const;
};

// Copies valid pieces on the threads of the CPU.
void unpack_by_cpu(const UnpackSides& sides, const std::vector<Pieces>& list);

// What faults name: the parts of a call's descriptors, or of a ring's.
struct DescriptorSites {
  FaultSite sites[kNumParts];

  explicit DescriptorSites(bool of_ring);
  void give_to(UnpackParams& params) const {
    for (int part = 0; part < kNumParts; ++part) params.sites[part] = sites[part];
  }
};
// IndexError for a descriptor on the CPU: nothing of the call, or of the ring's slot, was copied.
[[noreturn]] void raise_out_of_range(bool of_ring, i64 position, const Verdict& verdict);

// Queues the kernel on the scope's stream. `params` has all but `fault` and `num_copiers`.
void launch_unpack(const LaunchScope& scope, DescriptorFormat format, UnpackParams params);

}  // namespace jitkern
