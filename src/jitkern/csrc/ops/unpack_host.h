// What unpack knows of a call once it is checked, and its launch, also for sources that keep
// descriptors in device memory themselves.
#pragma once

#include <jitkern/launch.h>

#include <optional>
#include <vector>

#include "unpack.h"

namespace jitkern {

constexpr i64 kMostDescriptors = 1ll << 30;  // of one launch

// Where a call copies from and to, checked.
struct UnpackSides {
  Rows src;  // as one row
  Rows dst;

  UnpackSides(AnyView src, AnyView dst);

  const Rows& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // ValueError where the kernel cannot count the bytes.
  void check_sizes() const;
  // Addresses as the GPU has them, and sizes.
  UnpackParams params() const;
};

// A call that is checked.
struct UnpackCall : UnpackSides {
  Indices descriptors;
  std::optional<Indices> count;
  DescriptorFormat format;
  i64 num_descriptors;

  UnpackCall(AnyView src, AnyView dst, AnyView descriptors, AnyView count);

  // Descriptors on the CPU, as few pieces as possible of each, read once: those that count.
  // IndexError for the first that is out of range.
  std::vector<Pieces> checked_descriptors() const;
};

// Copies pieces that are inside of both sides, on the threads of the CPU.
void unpack_by_cpu(const UnpackSides& sides, const std::vector<Pieces>& list);

// The parts of a descriptor that faults name: of a call's, or of a ring's, by its position.
struct DescriptorSites {
  FaultSite sites[kNumParts];

  explicit DescriptorSites(bool of_ring);
  void give_to(UnpackParams& params) const {
    for (int part = 0; part < kNumParts; ++part) params.sites[part] = sites[part];
  }
};
// IndexError of a descriptor on the CPU, in the words of its part: nothing of the call, or of the
// ring's slot, was copied.
[[noreturn]] void raise_out_of_range(bool of_ring, i64 position, const Verdict& verdict);

// Queues the kernel on the scope's stream. `params` has all but `fault`: addresses as the GPU has
// them, the descriptors, or at most so many by a count in device memory. Over the link to host
// memory few SMs are enough.
void launch_unpack(const LaunchScope& scope, DescriptorFormat format, UnpackParams params);

}  // namespace jitkern
