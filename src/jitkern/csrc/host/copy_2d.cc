#include "host/copy_2d.h"

#include <algorithm>

#include "host/pinned.h"
#include "host/staging.h"

namespace jitkern {

namespace {

constexpr size_t kMostBatched = 4096;  // copies of one call of the driver; as many were tried

void queue_bytes(const LaunchScope& scope, CopyKind kind, char* dst, const char* src, i64 bytes) {
  if (kind == CopyKind::kH2D) return copy_to_device(dst, src, bytes, scope.stream());
  if (kind == CopyKind::kD2H) return copy_to_host(dst, src, bytes, scope.stream());
  JITKERN_CU(cuMemcpyAsync, address(dst), address(src), static_cast<size_t>(bytes), scope.stream());
}

PitchedMemory pitched(const char* memory, bool on_host, CopyKind kind, i64 pitch) {
  PitchedMemory side{};
  // Unified: the two sides of a copy in device memory may lie on two GPUs.
  side.type = on_host                  ? kMemoryTypeHost
              : kind == CopyKind::kD2D ? kMemoryTypeUnified
                                       : kMemoryTypeDevice;
  if (on_host) side.host = const_cast<char*>(memory);
  if (!on_host) side.device = address(memory);
  side.pitch = static_cast<size_t>(pitch);
  return side;
}

// Of host memory in one registration.
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

// Rows in one registration go together; a row in several goes in as many parts.
void queue_in_pieces(const LaunchScope& scope, CopyKind kind, const Copy2D& copy) {
  const auto part = [&copy](i64 row, i64 at) {
    Copy2D rest = copy;
    rest.dst += row * copy.dst_pitch + at;
    rest.src += row * copy.src_pitch + at;
    return rest;
  };
  const bool from_host = kind == CopyKind::kH2D;
  const i64 pitch = from_host ? copy.src_pitch : copy.dst_pitch;
  const auto bytes_left = [&](const Copy2D& rest) {  // of the registration that it begins in
    const u64 begin = address(from_host ? rest.src : rest.dst);
    return static_cast<i64>(registration_end(begin) - begin);
  };
  for (i64 row = 0; row < copy.height;) {
    Copy2D rest = part(row, 0);
    const i64 left = bytes_left(rest);
    if (left >= copy.width) {
      const i64 whole = copy.height == 1 ? 1 : (left - copy.width) / pitch + 1;
      rest.height = std::min(copy.height - row, whole);
      queue_whole(scope, kind, rest);
      row += rest.height;
      continue;
    }
    for (i64 at = 0; at < copy.width;) {
      const Copy2D piece = part(row, at);
      const i64 bytes = std::min(copy.width - at, bytes_left(piece));
      queue_bytes(scope, kind, piece.dst, piece.src, bytes);
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
  const bool is_default = address(scope.stream()) <= 2;  // NULL, or one of CUDA's names for it
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
      if (!one_registration) {  // which a copy may not leave
        const u64 host = address(kind_ == CopyKind::kH2D ? src + at : dst + at);
        bytes = std::min(bytes, static_cast<i64>(registration_end(host) - host));
      }
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
