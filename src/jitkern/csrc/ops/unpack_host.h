// What unpack knows of a call once it is checked, and its launch, also for sources that keep
// descriptors in device memory themselves.
#pragma once

#include <jitkern/launch.h>

#include <optional>
#include <vector>

#include "unpack.h"

namespace jitkern {

constexpr i64 kMostDescriptors = 1ll << 30;  // of one launch

// A call that is checked.
struct UnpackCall {
  Rows dst;  // as one row
  Rows src;
  Indices descriptors;
  std::optional<Indices> count;
  DescriptorFormat format;
  i64 num_descriptors;

  UnpackCall(AnyView dst, AnyView src, AnyView descriptors, AnyView count);

  const Rows& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // Descriptors on the CPU, as few pieces as possible of each, read once: those that count.
  // IndexError for the first that is out of range.
  std::vector<Pieces> checked_descriptors() const;
  // ValueError where the kernel cannot count them.
  void check_sizes() const;
};

// Copies them on the threads of the CPU.
void unpack_by_cpu(const UnpackCall& call, const std::vector<Pieces>& list);

// Writes the sites of an op into its parameters: faults are raised in its name, with the reach of
// the descriptor or the number in it that is wrong.
struct DescriptorSites {
  FaultSite sites[kNumParts];

  explicit DescriptorSites(const char* op);
  void give_to(UnpackParams& params) const {
    for (int part = 0; part < kNumParts; ++part) params.sites[part] = sites[part];
  }
};
// IndexError of a descriptor, in the words of its part.
[[noreturn]] void raise_out_of_range(const char* op, i64 number, const Verdict& verdict);

// Queues the kernel on the scope's stream. `params` has all but `fault`: addresses as the GPU has
// them, the descriptors, or at most so many by a count in device memory. Over the link to host
// memory few SMs are enough.
void launch_unpack(const LaunchScope& scope, DescriptorFormat format, UnpackParams params,
                   bool writes_host);

}  // namespace jitkern
