// Threads for calls that keep the CPU's cores busy for milliseconds: to move rows while a GPU
// works, or to touch a pool. They sleep where torch's OpenMP threads would spin: such a call waits
// for the GPU in between.
#pragma once

#include <jitkern/types.h>

#include <atomic>
#include <functional>

namespace jitkern {

// The further threads of one call. They sleep between two pieces of its work, and need not be woken
// for its end, which takes 3 us a thread in a virtual machine.
class Workers {
 public:
  // Up to `count` threads, fewer if no more can be started. They call work(), which must not throw
  // and returns when there is nothing to do for a while. Calls at the same time have threads of
  // their own each: one may wait for what its GPU waits for from another.
  Workers(i64 count, std::function<void()> work);
  // Returns once no thread is in work().
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // There is work: each thread calls work(), once more if it is about to return.
  void wake();

 private:
  const std::function<void()> work_;
  struct ThreadPool* pool_ = nullptr;
};

// Numbered parts of work, which become known while others are being done.
class Parts {
 public:
  // The next part's number, waiting up to 20 us; -1 if there is none.
  i64 take();
  // The same without waiting.
  i64 try_take();
  // Parts up to `count` are there.
  void publish(i64 count) { published_.store(count); }
  i64 published() const { return published_.load(std::memory_order_relaxed); }
  // Parts that are not taken yet stay undone.
  void close() { closed_.store(true); }

 private:
  std::atomic<i64> taken_{0};
  std::atomic<i64> published_{0};
  std::atomic<bool> closed_{false};
};

// Waits between two polls: spins for 20 us, then sleeps, longer and longer, up to 0.5 ms.
class Backoff {
 public:
  void wait();
  void reset() { waited_ns_ = 0; }

 private:
  i64 started_ns_ = 0;
  i64 waited_ns_ = 0;
};

// The cores that this process may run on.
i64 num_cores();

}  // namespace jitkern
