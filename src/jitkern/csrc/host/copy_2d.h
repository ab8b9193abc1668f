// Strided copies by the GPU's copy engine: rows of bytes, a pitch apart on either side.
#pragma once

#include <jitkern/launch.h>

namespace jitkern {

enum class CopyKind : int { kH2D, kD2H, kD2D, kH2H };

struct Copy2D {
  char* dst;
  const char* src;
  i64 dst_pitch;  // of no meaning where there is one row
  i64 src_pitch;
  i64 width;  // bytes of a row
  i64 height;

  bool empty() const { return width == 0 || height == 0; }
  // Whether both sides are one piece.
  bool is_contiguous() const { return height == 1 || (dst_pitch == width && src_pitch == width); }
};

// Whether the host's rows lie in one registration, so that any copy of them may be queued whole.
// ValueError with the cure where not all of them are pinned. The device's context is current.
bool is_one_registration(const Rows& host, const char* cure);

// Queues a copy that is not empty. Its rows, where both are wider than the engine's largest pitch,
// go one by one. Host memory is pinned, or pageable in all and `one_registration`.
void queue_copy(const LaunchScope& scope, CopyKind kind, const Copy2D& copy, bool one_registration);

// The copies of one call, of which the long rows are queued together: 512 KiB by 512 KiB come at 55
// GB/s, one by one at 42 for 3 us of rest between two. Rows of 16 KiB come at 5 GB/s so, and a
// decode step beside them takes 5 times as long: they go as strided copies, at 23.
constexpr i64 kMinBatchBytes = i64(64) << 10;
class CopyBatch {
 public:
  CopyBatch(const LaunchScope& scope, CopyKind kind)
      : scope_(scope), kind_(kind), can_batch_(can_batch(scope)) {}
  // As queue_copy.
  void add(const Copy2D& copy, bool one_registration);
  // Queues what was added and is not yet.
  void flush();

  // The driver takes no batch before CUDA 12.8, on the default stream, or into a graph.
  static bool can_batch(const LaunchScope& scope);

 private:
  const LaunchScope& scope_;
  const CopyKind kind_;
  const bool can_batch_;
  std::vector<CUdeviceptr> dst_, src_;
  std::vector<size_t> bytes_;
};

// The same on the CPU, by torch's threads.
void copy_on_cpu(const Copy2D& copy);

}  // namespace jitkern
