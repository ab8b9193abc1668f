// Shared by unpack and descriptor rings: source and destination, faults, the CPU implementation,
// the launch.
#pragma once

#include <vector>

#include "common.h"
#include "unpack.h"

namespace jitkern {

struct UnpackSides {
  Rows src;  // one row of all bytes
  Rows dst;

  UnpackSides(AnyView src, AnyView dst);

  const Rows& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // ValueError if there are more bytes than the kernel can count.
  void check_sizes() const;
  // The sizes, and the addresses that the GPU uses.
  UnpackParams params() const;
};

// Copies valid, simplified pieces on threads of the CPU.
void unpack_by_cpu(char* dst, const char* src, const std::vector<Pieces>& list);

// The fault sites of the parts of a call's descriptors, or of a ring's.
struct DescriptorSites {
  FaultSite sites[kNumParts];

  explicit DescriptorSites(bool of_ring);
  void give_to(UnpackParams& params) const {
    for (int part = 0; part < kNumParts; ++part) params.sites[part] = sites[part];
  }
};
// IndexError for a descriptor on the CPU. Nothing of the call, or of the ring's slot, was copied.
[[noreturn]] void raise_out_of_range(bool of_ring, i64 position, const Verdict& verdict);

// Queues the kernel on the scope's stream; sets `fault` and `num_copiers` of `params`.
void launch_unpack(const LaunchScope& scope, DescriptorFormat format, UnpackParams params);

}  // namespace jitkern
