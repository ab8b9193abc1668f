// A libcuda.so.1 without a GPU: each stream is a thread that does what is queued on it, in order
// and as late as a test wants; device memory is the host's, the one kernel is the copy of pairs.
//
// ThreadSanitizer sees the order that CUDA promises and no other: from a call of the driver to what
// it queued, along a stream, and from an event to whoever waited for it or found it done.
#pragma once

#include <jitkern/launch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "ops/pairs.h"

namespace fake {

using jitkern::CUstream;
using jitkern::i64;

constexpr int kNumDevices = 8;

// Calls of the driver that tests count, and have refused.
enum Kind : int { kCopy, kLaunch, kRecord, kWait, kQuery, kAllocation, kNumKinds };

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
// What ../comm/fake_nccl.cc asks: the device of this thread's context, a capture, events that live.
int current_device();
bool is_capturing();
i64 num_events();
// Queues something of a test's own.
void run_on(CUstream stream, std::function<void()> work);
// What is queued from now on waits for the point.
std::shared_ptr<Point> hold(CUstream stream);
void synchronize(CUstream stream);
void synchronize_all();
// All work of streams begins up to `us` later than it could.
void delay_at_random(i64 us);

i64 num_calls(Kind kind);
// The `number`-th call of the kind from now on fails, 1 being the next; 0: none.
void fail(Kind kind, i64 number);
// What another thread may do right in front of the next call of the kind.
void before_next(Kind kind, std::function<void()> run);
// Whether one of these is to fail now, which is then forgotten.
bool fails(Kind kind);
void set_capturing(bool capturing);
// Pairs that a kernel found out of range.
i64 num_faults();

[[noreturn]] void fail_program(const std::string& what);

// Device memory, and pinned memory: what the GPU touches outside of it ends the program.
void know(const char* memory, i64 bytes, jitkern::u32 type, int device);
void forget(const char* memory);
void require_memory(const void* at, i64 bytes, const char* what);

}  // namespace fake
