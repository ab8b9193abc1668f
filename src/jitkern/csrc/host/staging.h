// Pinned memory: the callers', which a GPU accesses in place, and a ring per device for small
// uploads. Also events, streams and copies by the driver.
#pragma once

#include <jitkern/launch.h>

#include <atomic>
#include <deque>
#include <mutex>

namespace jitkern {

// The GPU's address of `rows` in memory that was allocated as pinned, or registered in one or
// several adjacent pieces. ValueError with the cure if not all rows are pinned. The device's
// context is current.
constexpr const char* kPinCure =
    "pinned host memory for a copy with a GPU; allocate it with torch.empty(..., pin_memory=True) "
    "or call .pin_memory()";
char* mapped_rows(const Rows& rows, const char* cure = kPinCure);
// The end of the registration of the byte at this address, beyond which one copy of the engine may
// not go; 0 if the byte is not pinned. The device's context is current.
u64 registration_end(u64 at);

// The number of PinnedPools closed so far. Addresses looked up before the last one may be gone.
inline std::atomic<u64> num_pools_closed{0};

// A device's ring of pinned memory for small copies to it, made at first use and never freed.
class Uploads {
 public:
  static constexpr i64 kBytes = i64(16) << 20;

  // Returns the ring of the scope's device. The device's context must be current.
  static Uploads& get(const LaunchScope& scope);

  // A call holds it from take() to mark().
  std::mutex mutex;
  // Returns the next `bytes`, at most kBytes. Waits until the GPU has copied earlier data there.
  char* take(i64 bytes);
  // All bytes taken so far are copied when the stream reaches this point.
  void mark(CUstream stream);

 private:
  struct Taken {
    i64 begin;
    i64 end;
    CUevent read;
  };
  char* memory_ = nullptr;
  i64 begin_ = 0;  // bytes [begin_, end_) are taken and not marked
  i64 end_ = 0;
  std::deque<Taken> taken_;
  std::vector<CUevent> free_;
};

// Waits between two polls: spins for 20 us, then sleeps for ever longer times, up to 0.5 ms.
class Backoff {
 public:
  void wait();
  void reset() { waited_ns_ = 0; }

 private:
  i64 started_ns_ = 0;
  i64 waited_ns_ = 0;
};

// Streams and events of the current context. Streams do not synchronise with the default stream.
CUstream make_stream(int priority);
CUevent make_event();
void destroy_event(CUevent event);  // null is allowed; errors are ignored
void record(CUevent event, CUstream stream);
void wait_for(CUstream stream, CUevent event);
// Whether the work before the event is done.
bool is_done(CUevent event);
// Waits for the event; the thread sleeps most of the time.
void wait_for(CUevent event);
char* allocate_pinned(i64 bytes);
void copy_to_device(char* device, const char* host, i64 bytes, CUstream stream);
void copy_to_host(char* host, const char* device, i64 bytes, CUstream stream);

}  // namespace jitkern
