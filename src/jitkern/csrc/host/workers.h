// Threads of jitkern's own, for calls that keep the CPU's cores for milliseconds: to move rows
// while a GPU works, to touch a pool. They sleep where torch's OpenMP would spin: such a call waits
// for the GPU in between.
#pragma once

#include <jitkern/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>

namespace jitkern {

// Numbered parts of work, which become known while others are being done.
class Parts {
 public:
  // The next part's number; waits, after 20 us asleep, until there is one. -1: there will be none.
  i64 take();
  // The same, -1: none now.
  i64 try_take();
  // Parts up to `count` are there.
  void publish(i64 count);
  i64 published() const { return published_.load(std::memory_order_relaxed); }
  // There will be no more: parts that nobody has taken stay undone.
  void close();

 private:
  std::atomic<i64> taken_{0};
  std::atomic<i64> published_{0};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Calls work() on up to `count` other threads and lead() on this one; returns once all have
// returned, with the exception of lead(), if any. work() must not throw, and must return whatever
// becomes of lead(); where no thread can be had lead() is alone. Calls at the same time have
// threads of their own each: one may wait for what its GPU waits for from another.
void run_with_workers(i64 count, const std::function<void()>& work,
                      const std::function<void()>& lead);

// Waits between two questions: spins for 20 us, then sleeps, longer and longer, up to 0.5 ms.
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
