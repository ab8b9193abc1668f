// Splitting a CPU implementation over threads.
#pragma once

#include <jitkern/types.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <system_error>
#include <thread>

namespace jitkern {

// Threads that a call may use; torch.get_num_threads() unless set otherwise.
int num_threads();

// To start a thread costs 5 to 15 us, in which one core reads and writes about 256 KiB.
// With p threads a call takes p starts and 1 / p of the copy, which is least at
// p = sqrt(bytes / 256 KiB). With twice that, two threads start at 2 MiB: less may sit in the L2 of
// the caller's core, and is copied in the time of a start.
constexpr i64 kBytesPerStart = i64(512) << 10;

// Parts per thread: one that is slow leaves its parts to the others.
constexpr i64 kPartsPerThread = 4;

// Calls run(begin, end) for parts of [0, count), on several threads where that pays. `run` must not
// throw. `bytes` is what the whole loop reads and writes. Threads are started per call: a pool
// would not survive fork. Nobody waits for a thread that has not begun when the last part is taken:
// on a busy machine that would be milliseconds.
template <class Run>
void parallel_for(i64 count, i64 bytes, const Run& run) {
  const double best = std::sqrt(static_cast<double>(bytes) / kBytesPerStart);
  const i64 threads = std::min({i64(num_threads()), static_cast<i64>(best), count});
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
  const auto work = [progress, parts, count, &run] {
    for (i64 part = progress->taken++; part < parts; part = progress->taken++) {
      run(count * part / parts, count * (part + 1) / parts);
      ++progress->done;
    }
  };
  try {
    for (i64 i = 1; i < threads; ++i) std::thread(work).detach();
  } catch (const std::system_error&) {
    // The process may not have more threads; those that there are do all parts.
  }
  work();
  while (progress->done < parts) std::this_thread::yield();
}

}  // namespace jitkern
