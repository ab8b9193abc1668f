// Strided copies by the GPU's copy engine.
#pragma once

#include <jitkern/launch.h>

namespace jitkern {

enum class CopyKind : int { kH2D, kD2H, kD2D, kH2H };

struct Copy2D {
  char* dst;
  const char* src;
  i64 dst_pitch;  // ignored if there is one row
  i64 src_pitch;
  i64 width;  // bytes of a row
  i64 height;

  // Whether each side is contiguous.
  bool is_contiguous() const { return height == 1 || (dst_pitch == width && src_pitch == width); }
};

// Whether the host's rows are in one registration, so that one copy may take all of them.
// ValueError with the cure if not all are pinned. The device's context is current.
bool is_one_registration(const Rows& host, const char* cure);

// Queues a copy, which is not empty. Its host memory is pinned; or pageable if `one_registration`.
void queue_copy(const LaunchScope& scope, CopyKind kind, const Copy2D& copy, bool one_registration);

// The copies of one call. Long rows are queued as one batch: rows of 512 KiB reach 55 GB/s; one by
// one 42, with 3 us between them. Rows of 16 KiB in a batch reach 5 GB/s and make a concurrent
// decode step 5 times as long; strided copies reach 23.
constexpr i64 kMinBatchBytes = i64(64) << 10;
class CopyBatch {
 public:
  CopyBatch(const LaunchScope& scope, CopyKind kind)
      : scope_(scope), kind_(kind), can_batch_(can_batch(scope)) {}
  // See queue_copy.
  void add(const Copy2D& copy, bool one_registration);
  // Queues the batch.
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

}  // namespace jitkern
