// Threads of jitkern's own, for calls that keep the CPU's cores for milliseconds: to move rows
// while a GPU works, to touch a pool. They sleep where torch's OpenMP would spin: such a call waits
// for the GPU in between.
#pragma once

#include <jitkern/types.h>

#include <atomic>
#include <functional>

namespace jitkern {

// Other threads of one call. They rest between two pieces of its work, and nobody has to wake them
// for its end: that takes 3 us a thread in a virtual machine.
class Workers {
 public:
  // Up to `count`, at rest; where no thread can be had, none. They call work(), which must not
  // throw and has to return when there is nothing to do for a while. Calls at the same time have
  // threads of their own each: one may wait for what its GPU waits for from another.
  Workers(i64 count, std::function<void()> work);
  // Returns once none is at work.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // There is work: each calls work(), once more where it is about to return.
  void wake();

 private:
  const std::function<void()> work_;
  struct Crew* crew_ = nullptr;
};

// Numbered parts of work, which become known while others are being done.
class Parts {
 public:
  // The next part's number, if there is one within 20 us, else -1.
  i64 take();
  // The same at once.
  i64 try_take();
  // Parts up to `count` are there.
  void publish(i64 count) { published_.store(count); }
  i64 published() const { return published_.load(std::memory_order_relaxed); }
  // There are no more: those that nobody has taken stay undone.
  void close() { closed_.store(true); }

 private:
  std::atomic<i64> taken_{0};
  std::atomic<i64> published_{0};
  std::atomic<bool> closed_{false};
};

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
