#include "host/copy_2d.h"

#include <algorithm>

#include "host/staging.h"

namespace jitkern {

namespace {

constexpr size_t kMostBatched = 4096;  // copies per call of the driver; more were not tried

void queue_bytes(const LaunchScope& scope, CopyKind kind, char* dst, const char* src, i64 bytes) {
  if (kind == CopyKind::kH2D) return copy_to_device(dst, src, bytes, scope.stream());
  if (kind == CopyKind::kD2H) return copy_to_host(dst, src, bytes, scope.stream());
  JITKERN_CU(cuMemcpyAsync, address(dst), address(src), static_cast<size_t>(bytes), scope.stream());
}

// The driver finds out on which device, or whether in host memory, it is.
PitchedMemory pitched(const char* memory, i64 pitch) {
  PitchedMemory side{};
  side.type = kMemoryTypeUnified;
  side.device = address(memory);
  side.pitch = static_cast<size_t>(pitch);
  return side;
}

// The bytes from the host's side of a copy to the end of its registration.
i64 bytes_left(CopyKind kind, const char* dst, const char* src) {
  const u64 begin = address(kind == CopyKind::kH2D ? src : dst);
  return static_cast<i64>(registration_end(begin) - begin);
}

// Calls `queue(dst, src, bytes)` for each row; if the host's rows are in several registrations, for
// the part of a row in each.
template <class Queue>
void for_pieces(CopyKind kind, const Copy2D& copy, bool one_registration, const Queue& queue) {
  const i64 height = copy.is_contiguous() ? 1 : copy.height;
  const i64 row_bytes = copy.width * copy.height / height;
  for (i64 i = 0; i < height; ++i) {
    char* const dst = copy.dst + i * copy.dst_pitch;
    const char* const src = copy.src + i * copy.src_pitch;
    for (i64 at = 0; at < row_bytes;) {
      i64 bytes = row_bytes - at;
      if (!one_registration) bytes = std::min(bytes, bytes_left(kind, dst + at, src + at));
      queue(dst + at, src + at, bytes);
      at += bytes;
    }
  }
}

}  // namespace

bool is_one_registration(const Rows& host, const char* cure) {
  if (registration_end(host.begin) >= host.end) return true;
  mapped_rows(host, cure);
  return false;
}

void queue_copy(const LaunchScope& scope, CopyKind kind, const Copy2D& copy,
                bool one_registration) {
  if (copy.is_contiguous() || !one_registration ||
      std::max(copy.dst_pitch, copy.src_pitch) > scope.device.max_pitch) {
    return for_pieces(kind, copy, one_registration, [&](char* dst, const char* src, i64 bytes) {
      queue_bytes(scope, kind, dst, src, bytes);
    });
  }
  PitchedCopy call{};
  call.src = pitched(copy.src, copy.src_pitch);
  call.dst = pitched(copy.dst, copy.dst_pitch);
  call.width = static_cast<size_t>(copy.width);
  call.height = static_cast<size_t>(copy.height);
  JITKERN_CU(cuMemcpy2DAsync_v2, &call, scope.stream());
}

bool CopyBatch::can_batch(const LaunchScope& scope) {
  const bool is_default = address(scope.stream()) <= 2;  // NULL, CU_STREAM_LEGACY or _PER_THREAD
  return Driver::get().cuMemcpyBatchAsync != nullptr && !is_default &&
         !is_capturing(scope.stream());
}

void CopyBatch::add(const Copy2D& copy, bool one_registration) {
  const i64 row_bytes = copy.is_contiguous() ? copy.width * copy.height : copy.width;
  if (!can_batch_ || row_bytes < kMinBatchBytes) {
    return queue_copy(scope_, kind_, copy, one_registration);
  }
  for_pieces(kind_, copy, one_registration, [this](char* dst, const char* src, i64 bytes) {
    dst_.push_back(address(dst));
    src_.push_back(address(src));
    bytes_.push_back(static_cast<size_t>(bytes));
  });
}

void CopyBatch::flush() {
  CopyAttributes attributes{};
  attributes.src_access_order = kSrcAccessOrderStream;
  size_t first = 0;
  for (size_t at = 0; at < bytes_.size(); at += kMostBatched) {
    size_t failed = 0;
    JITKERN_CU(cuMemcpyBatchAsync, &dst_[at], &src_[at], &bytes_[at],
               std::min(bytes_.size() - at, kMostBatched), &attributes, &first, 1, &failed,
               scope_.stream());
  }
  bytes_.clear();
}

}  // namespace jitkern
