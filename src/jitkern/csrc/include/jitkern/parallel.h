// Splitting a CPU implementation over threads.
#pragma once

#include <jitkern/types.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

namespace jitkern {

// How many threads a loop of `count` rounds that reads and writes `bytes` is worth, at most
// torch.get_num_threads().
i64 threads_for(i64 count, i64 bytes);

// Calls `work` on this thread and on others, `threads` or more in all where they can be had. May
// return before a late thread has begun, which then calls a copy of `work`.
void on_threads(i64 threads, const std::function<void()>& work);

// Parts per thread: one that is slow leaves its parts to the others.
constexpr i64 kPartsPerThread = 4;

// Calls run(begin, end) for parts of [0, count) on that many threads. `run` must not throw.
template <class Run>
void parallel_for(i64 count, i64 threads, const Run& run) {
  if (threads <= 1) {
    run(i64(0), count);
    return;
  }
  struct Progress {
    std::atomic<i64> taken{0};
    std::atomic<i64> done{0};
  };
  const i64 parts = std::min(threads * kPartsPerThread, count);
  const auto progress = std::make_shared<Progress>();
  // A late thread finds no part to take, and then does not touch `run`, which may be gone.
  on_threads(threads, [progress, parts, count, &run] {
    for (i64 part = progress->taken++; part < parts; part = progress->taken++) {
      run(count * part / parts, count * (part + 1) / parts);
      ++progress->done;
    }
  });
  while (progress->done < parts) std::this_thread::yield();
}

}  // namespace jitkern
