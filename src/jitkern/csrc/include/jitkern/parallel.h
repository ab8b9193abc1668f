// Splitting a CPU implementation over threads.
#pragma once

#include <jitkern/types.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <system_error>
#include <thread>
#include <vector>

namespace jitkern {

// Threads that a call may use; torch.get_num_threads() unless set otherwise.
int num_threads();

// To start and join a thread costs 7 to 15 us, in which one core reads and writes about 256 KiB.
// With p threads a call takes p starts and 1 / p of the copy, which is least at
// p = sqrt(bytes / 256 KiB). With twice that, two threads start at 2 MiB: less may sit in the L2 of
// the caller's core, and is copied in the time of a start.
constexpr i64 kBytesPerStart = i64(512) << 10;

// Parts per thread. On a busy machine a thread may start late; the others then take its parts.
constexpr i64 kPartsPerThread = 4;

// Calls run(begin, end) for parts of [0, count), on several threads where that pays. `run` must not
// throw. `bytes` is what the whole loop reads and writes. Threads are started per call: a pool
// would not survive fork.
template <class Run>
void parallel_for(i64 count, i64 bytes, const Run& run) {
  const double best = std::sqrt(static_cast<double>(bytes) / kBytesPerStart);
  const i64 threads_wanted = std::min({i64(num_threads()), static_cast<i64>(best), count});
  if (threads_wanted <= 1) {
    run(i64(0), count);
    return;
  }
  const i64 parts = std::min(threads_wanted * kPartsPerThread, count);
  std::atomic<i64> next{0};
  const auto work = [&] {
    for (i64 part = next++; part < parts; part = next++) {
      run(count * part / parts, count * (part + 1) / parts);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(threads_wanted - 1);
  try {
    while (i64(threads.size()) < threads_wanted - 1) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The process may not have more threads; those that there are do all parts.
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jitkern
