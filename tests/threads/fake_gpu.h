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
class Point {
 public:
  void set();
  bool is_set() const { return is_set_.load(std::memory_order_acquire) != 0; }
  void wait() const;

 private:
  std::atomic<int> is_set_{0};
};

CUstream make_stream(int device);
int device_of(CUstream stream);
// The device of this thread's context.
int current_device();
bool is_capturing();
i64 num_events();
// Queues something of a test's own.
void run_on(CUstream stream, std::function<void()> work);
// What is queued from now on waits for the point.
std::shared_ptr<Point> hold(CUstream stream);
void synchronize(CUstream stream);
void synchronize_all();

void set_capturing(bool capturing);

[[noreturn]] void fail_program(const std::string& what);

// Device memory, and pinned memory: what the GPU touches outside of it ends the program.
void know(const char* memory, i64 bytes, jitkern::u32 type, int device);
void forget(const char* memory);
void require_memory(const void* at, i64 bytes, const char* what);

}  // namespace fake
