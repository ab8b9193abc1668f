// Splitting a CPU implementation over threads.
#pragma once

#include <jitkern/types.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace jitkern {

// Threads that a call may use; torch.get_num_threads() unless set otherwise.
int num_threads();

// A thread costs about 15 us to start and join, the time in which one core moves 150 KB; from 1 MiB
// a thread on, that is lost in the copy. Threads are started per call: a pool would not survive
// fork.
constexpr i64 kMinBytesPerThread = i64(1) << 20;

// Calls run(begin, end) for parts of [0, count), each part in a thread of its own. `run` must not
// throw. `bytes` is what the whole loop moves.
template <class Run>
void parallel_for(i64 count, i64 bytes, const Run& run) {
  const i64 parts = std::min({i64(num_threads()), bytes / kMinBytesPerThread, count});
  if (parts <= 1) {
    run(i64(0), count);
    return;
  }
  std::vector<std::thread> threads;
  threads.reserve(parts - 1);
  for (i64 part = 1; part < parts; ++part) {
    threads.emplace_back(
        [&run, part, parts, count] { run(count * part / parts, count * (part + 1) / parts); });
  }
  run(i64(0), count / parts);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jitkern
