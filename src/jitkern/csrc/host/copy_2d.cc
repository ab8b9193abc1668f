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

PitchedMemory pitched(const char* memory, bool on_host, CopyKind kind, i64 pitch) {
  PitchedMemory side{};
  // Unified, because a copy of device memory may be between two GPUs.
  side.type = on_host                  ? kMemoryTypeHost
              : kind == CopyKind::kD2D ? kMemoryTypeUnified
                                       : kMemoryTypeDevice;
  if (on_host) side.host = const_cast<char*>(memory);
  if (!on_host) side.device = address(memory);
  side.pitch = static_cast<size_t>(pitch);
  return side;
}

// Queues a copy whose host memory lies in one registration.
void queue_whole(const LaunchScope& scope, CopyKind kind, const Copy2D& copy) {
  if (copy.is_contiguous()) {
    return queue_bytes(scope, kind, copy.dst, copy.src, copy.width * copy.height);
  }
  if (std::max(copy.dst_pitch, copy.src_pitch) > scope.device.max_pitch) {
    for (i64 i = 0; i < copy.height; ++i) {
      queue_bytes(scope, kind, copy.dst + i * copy.dst_pitch, copy.src + i * copy.src_pitch,
                  copy.width);
    }
    return;
  }
  PitchedCopy call{};
  call.src = pitched(copy.src, kind == CopyKind::kH2D, kind, copy.src_pitch);
  call.dst = pitched(copy.dst, kind == CopyKind::kD2H, kind, copy.dst_pitch);
  call.width = static_cast<size_t>(copy.width);
  call.height = static_cast<size_t>(copy.height);
  JITKERN_CU(cuMemcpy2DAsync_v2, &call, scope.stream());
}

// The bytes from the host's side of a copy to the end of its registration.
i64 bytes_left(CopyKind kind, const char* dst, const char* src) {
  const u64 begin = address(kind == CopyKind::kH2D ? src : dst);
  return static_cast<i64>(registration_end(begin) - begin);
}

// Rows in one registration are one copy; a row in several is one copy for each.
void queue_in_pieces(const LaunchScope& scope, CopyKind kind, const Copy2D& copy) {
  const i64 pitch = kind == CopyKind::kH2D ? copy.src_pitch : copy.dst_pitch;
  for (i64 row = 0; row < copy.height;) {
    Copy2D rest = copy;
    rest.dst += row * copy.dst_pitch;
    rest.src += row * copy.src_pitch;
    const i64 left = bytes_left(kind, rest.dst, rest.src);
    if (left >= copy.width) {
      const i64 whole = copy.height == 1 ? 1 : (left - copy.width) / pitch + 1;
      rest.height = std::min(copy.height - row, whole);
      queue_whole(scope, kind, rest);
      row += rest.height;
      continue;
    }
    for (i64 at = 0; at < copy.width;) {
      const i64 bytes = std::min(copy.width - at, bytes_left(kind, rest.dst + at, rest.src + at));
      queue_bytes(scope, kind, rest.dst + at, rest.src + at, bytes);
      at += bytes;
    }
    ++row;
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
  one_registration ? queue_whole(scope, kind, copy) : queue_in_pieces(scope, kind, copy);
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
  for (i64 i = 0; i < (copy.is_contiguous() ? 1 : copy.height); ++i) {
    const char* const src = copy.src + i * copy.src_pitch;
    char* const dst = copy.dst + i * copy.dst_pitch;
    for (i64 at = 0; at < row_bytes;) {
      i64 bytes = row_bytes - at;
      if (!one_registration) bytes = std::min(bytes, bytes_left(kind_, dst + at, src + at));
      dst_.push_back(address(dst + at));
      src_.push_back(address(src + at));
      bytes_.push_back(static_cast<size_t>(bytes));
      at += bytes;
    }
  }
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
