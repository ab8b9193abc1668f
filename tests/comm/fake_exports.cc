// What tests in Python ask of fake_gpu.cc and fake_nccl.cc.
#include <cstdlib>
#include <memory>

#include "fake_gpu.h"
#include "fake_knobs.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using jitkern::CUstream;
using namespace fake;

EXPORT void fake_nccl_queue_limit(i64 limit) { knobs.queue_limit = limit; }
EXPORT void fake_nccl_graphs(i64 count) { knobs.num_graphs = count; }
// The next call returns this.
EXPORT void fake_nccl_next_result(int result, const char* text) {
  const std::lock_guard<std::mutex> lock(knobs.mutex);
  knobs.last_error = text;
  knobs.next_result = result;
}
// The `number`-th call from now on never ends, and NCCL says that a rank is gone.
EXPORT void fake_nccl_fail_after(i64 number) {
  knobs.failing_call = knobs.num_queued_calls + number;
}
EXPORT i64 fake_nccl_num_comms() { return knobs.num_comms; }
EXPORT void fake_nccl_replay(CUstream stream) {
  const std::lock_guard<std::mutex> lock(knobs.mutex);
  for (const auto& queue : knobs.captured) queue(stream);
}
EXPORT void fake_nccl_forget_graph() {
  const std::lock_guard<std::mutex> lock(knobs.mutex);
  knobs.captured.clear();
}

EXPORT CUstream fake_stream(int device) { return make_stream(device); }
EXPORT void* fake_hold(CUstream stream) { return new std::shared_ptr<Point>(hold(stream)); }
EXPORT void fake_release(std::shared_ptr<Point>* point) { (*point)->set(), delete point; }
EXPORT void fake_synchronize(CUstream stream) { synchronize(stream); }
EXPORT void fake_know(const char* memory, i64 bytes, int device) {
  know(memory, bytes, jitkern::kMemoryTypeDevice, device);
}
EXPORT void fake_forget(const char* memory) { forget(memory); }
EXPORT void fake_capturing(int is_on) { set_capturing(is_on != 0); }
EXPORT i64 fake_num_events() { return num_events(); }
EXPORT i64 fake_num_records() { return num_calls(kRecord); }

// The driver ends a process when its GPUs are done.
static void __attribute__((destructor)) wait_for_streams() {
  if (std::getenv("FAKE_EXIT_WAITS") != nullptr) synchronize_all();
}
