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

// The same on the CPU, by torch's threads.
void copy_on_cpu(const Copy2D& copy);

}  // namespace jitkern
