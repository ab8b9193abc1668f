// A libcuda.so.1 without a GPU, for ../comm/fake_nccl.cc: each stream is a thread that does what is
// queued on it, in order; device memory is the host's, and there are no kernels.
#pragma once

#include <jitkern/launch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace fake {

using jitkern::CUstream;
using jitkern::i64;

constexpr int kNumDevices = 8;

// Something that becomes true once.
struct Point {
  std::atomic<bool> is_set{false};
  void wait() const;
};

CUstream make_stream(int device);
int device_of(CUstream stream);
// The device of this thread's context.
int current_device();
bool is_capturing();
i64 num_events();
// Queues something of a test's own.
void run_on(CUstream stream, std::function<void()> work);
void synchronize(CUstream stream);
void synchronize_all();

void set_capturing(bool capturing);

[[noreturn]] void fail_program(const std::string& what);

}  // namespace fake
