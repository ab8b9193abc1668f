#include "host/staging.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

namespace jitkern {

namespace {

constexpr i64 kAlignBytes = 128;

i64 now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string range_text(u64 begin, u64 end) {
  char text[64];
  std::snprintf(text, sizeof(text), "[0x%llx, 0x%llx)", begin, end);
  return text;
}

bool is_mapped(const MemoryRange& range) {
  return range.type == kMemoryTypeHost && range.device_address != nullptr;
}

// The end of the pinned memory that begins with `first`, the registration of the rows' first byte.
// Adjacent registrations count if the GPU's addresses are adjacent too.
u64 mapped_end(const Rows& rows, const MemoryRange& first) {
  u64 end = address(first.begin) + static_cast<u64>(first.bytes);
  while (end < rows.end) {
    const MemoryRange next = memory_range(reinterpret_cast<const void*>(end));
    const u64 wanted = address(first.device_address) + (end - address(rows.data));
    if (!is_mapped(next) || address(next.device_address) != wanted) break;
    end = address(next.begin) + static_cast<u64>(next.bytes);
  }
  return end;
}

}  // namespace

char* mapped_rows(const Rows& rows, const char* cure) {
  const MemoryRange first = memory_range(rows.data);
  if (!is_mapped(first)) rows.value_error("pageable host memory", cure);
  if (const u64 end = mapped_end(rows, first); end < rows.end) {
    rows.value_error(str("rows at ", range_text(rows.begin, rows.end), ", of which ",
                         range_text(rows.begin, end), " is pinned"),
                     "pinned host memory for all of them");
  }
  return const_cast<char*>(first.device_address);
}

u64 registration_end(u64 at) {
  const MemoryRange range = memory_range(reinterpret_cast<const void*>(at));
  return is_mapped(range) ? address(range.begin) + static_cast<u64>(range.bytes) : 0;
}

char* allocate_pinned(i64 bytes) {
  void* memory = nullptr;
  JITKERN_CU(cuMemHostAlloc, &memory, static_cast<size_t>(bytes), kHostAllocPortable);
  return static_cast<char*>(memory);
}

CUstream make_stream(int priority) {
  CUstream stream = nullptr;
  JITKERN_CU(cuStreamCreateWithPriority, &stream, kStreamNonBlocking, priority);
  return stream;
}

CUevent make_event() {
  CUevent event = nullptr;
  JITKERN_CU(cuEventCreate, &event, kEventDisableTiming);
  return event;
}

void destroy_event(CUevent event) {
  if (event != nullptr) Driver::get().cuEventDestroy_v2(event);
}

void record(CUevent event, CUstream stream) { JITKERN_CU(cuEventRecord, event, stream); }

void wait_for(CUstream stream, CUevent event) { JITKERN_CU(cuStreamWaitEvent, stream, event, 0); }

bool is_done(CUevent event) {
  const Driver& driver = Driver::get();
  const CUresult result = driver.cuEventQuery(event);
  if (result != kCudaErrorNotReady) driver.check(result, "cuEventQuery");
  return result == kCudaSuccess;
}

void wait_for(CUevent event) {
  for (Backoff backoff; !is_done(event);) backoff.wait();
}

void Backoff::wait() {
  constexpr i64 kSpinNs = 20'000;
  constexpr i64 kLongestSleepNs = 500'000;
  if (waited_ns_ == 0) started_ns_ = now_ns();
  waited_ns_ = std::max<i64>(1, now_ns() - started_ns_);
  if (waited_ns_ < kSpinNs) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns_ / 2, kLongestSleepNs)));
}

void copy_to_device(char* device, const char* host, i64 bytes, CUstream stream) {
  JITKERN_CU(cuMemcpyHtoDAsync_v2, address(device), host, static_cast<size_t>(bytes), stream);
}

void copy_to_host(char* host, const char* device, i64 bytes, CUstream stream) {
  JITKERN_CU(cuMemcpyDtoHAsync_v2, host, address(device), static_cast<size_t>(bytes), stream);
}

Uploads& Uploads::get(const LaunchScope& scope) {
  static auto& all = *new std::array<Uploads, kMaxDevices>();
  return all[static_cast<size_t>(scope.device.ordinal)];
}

char* Uploads::take(i64 bytes) {
  if (memory_ == nullptr) memory_ = allocate_pinned(kBytes);
  bytes = ceil_div(bytes, kAlignBytes) * kAlignBytes;
  if (end_ + bytes > kBytes) begin_ = end_ = 0;  // wraps around
  const auto overlaps = [&](const Taken& other) {
    return other.begin < end_ + bytes && end_ < other.end;
  };
  // The GPU reads the oldest first.
  while (!taken_.empty()) {
    const CUevent oldest = taken_.front().read;
    if (std::any_of(taken_.begin(), taken_.end(), overlaps)) {
      wait_for(oldest);
    } else if (!is_done(oldest)) {
      break;
    }
    free_.push_back(oldest);
    taken_.pop_front();
  }
  char* const block = memory_ + end_;
  end_ += bytes;
  return block;
}

void Uploads::mark(CUstream stream) {
  if (free_.empty()) free_.push_back(make_event());
  record(free_.back(), stream);
  taken_.push_back({begin_, end_, free_.back()});
  free_.pop_back();
  begin_ = end_;
}

}  // namespace jitkern
