// What tests set in fake_nccl.cc, and count there.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "fake_gpu.h"

namespace fake {

struct Knobs {
  std::atomic<i64> queue_limit{i64(1) << 30};  // of operations that are not done, of all streams
  std::atomic<i64> num_unfinished{0};
  std::atomic<i64> num_graphs{0};  // that have captured a communicator
  std::atomic<i64> num_queued_calls{0};
  std::atomic<i64> num_comms{0};
  std::atomic<int> next_result{0};
  std::atomic<i64> failing_call{0};  // whose operation never ends
  std::mutex mutex;                  // guards what follows
  std::string last_error;
  std::vector<std::function<void(CUstream)>> captured;
};
extern Knobs knobs;

}  // namespace fake
