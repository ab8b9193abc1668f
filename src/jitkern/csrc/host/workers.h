// Threads for calls that use the CPU's cores for milliseconds: to move rows while a GPU works, or
// to touch a pool. They sleep while the call waits for the GPU; torch's OpenMP threads would spin.
#pragma once

#include <jitkern/types.h>

#include <atomic>
#include <functional>

namespace jitkern {

// The additional threads of one call. They sleep between pieces of work, and are not woken at its
// end: to wake a thread takes 3 us in a virtual machine.
class Workers {
 public:
  // Up to `count` threads, fewer if no more can be started. They call work(), which must not throw,
  // and returns when there is nothing to do for a while. Simultaneous calls have separate threads:
  // a call may wait until its GPU has waited for another one.
  Workers(i64 count, std::function<void()> work);
  // Returns once no thread is in work().
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Tells threads that there is work: each calls work(), again if it is about to return.
  void wake();

 private:
  const std::function<void()> work_;
  struct ThreadPool* pool_ = nullptr;
};

// Numbered parts of work. Parts may be published while others are being done.
class Parts {
 public:
  // Returns the next part's number after at most 20 us, or -1.
  i64 take();
  // The same without waiting.
  i64 try_take();
  // Makes the first `count` parts available.
  void publish(i64 count) { published_.store(count); }
  i64 published() const { return published_.load(std::memory_order_relaxed); }
  // Parts that are not taken yet will not be.
  void close() { closed_.store(true); }

 private:
  std::atomic<i64> taken_{0};
  std::atomic<i64> published_{0};
  std::atomic<bool> closed_{false};
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

// The number of cores that this process may use.
i64 num_cores();

}  // namespace jitkern
