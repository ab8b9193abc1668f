#include <linux/futex.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>

#include "fake_gpu.h"

namespace {

using fake::i64;
using fake::Point;
using namespace jitkern;

constexpr CUresult kNoKernels = 801;  // "operation not supported"

// Kept for good, as its threads are.
template <class T>
T& global() {
  static T* one = new T();
  return *one;
}

std::atomic<bool> has_capture{false};
std::atomic<i64> living_events{0};

struct Range {
  i64 bytes;
  u32 type;
  int ordinal;
};
struct Memories {
  std::shared_mutex mutex;
  std::map<u64, Range> ranges;

  void add(const void* at, Range range) {
    const std::lock_guard<std::shared_mutex> lock(mutex);
    ranges[reinterpret_cast<u64>(at)] = range;
  }
  void forget(const void* at) {
    const std::lock_guard<std::shared_mutex> lock(mutex);
    if (ranges.erase(reinterpret_cast<u64>(at)) == 0) fake::fail_program("frees what is no memory");
  }
  // The range that holds these bytes, of type 0 if none does.
  std::pair<u64, Range> find(u64 at, i64 bytes) {
    const std::shared_lock<std::shared_mutex> lock(mutex);
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return {};
    --next;
    const bool inside = at + static_cast<u64>(bytes) <= next->first + next->second.bytes;
    return inside ? std::pair(next->first, next->second) : std::pair<u64, Range>{};
  }
};
Memories& memories() { return global<Memories>(); }

}  // namespace

namespace jitkern {

struct CUctx_st {
  int device = -1;
};
static thread_local CUcontext current = nullptr;

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Point> point;  // of the last record; none yet
};

// What is queued is a list, of which the thread holds on to the last node that it did.
struct CUstream_st {
  struct Node {
    std::function<void()> work;
    std::atomic<Node*> next{nullptr};
  };
  int device;
  std::mutex mutex;  // of those who queue
  Node* last = new Node();
  Node* done = last;
  sem_t num_waiting;

  explicit CUstream_st(int device) : device(device) {
    sem_init(&num_waiting, 0, 0);
    std::thread([this] { loop(); }).detach();
  }
  void put(std::function<void()> work) {
    auto* node = new Node{std::move(work)};
    const std::lock_guard<std::mutex> lock(mutex);
    last->next.store(node, std::memory_order_release);
    last = node;
    sem_post(&num_waiting);
  }
  void loop() {
    while (true) {
      while (sem_wait(&num_waiting) != 0) {
      }
      Node* node = done->next.load(std::memory_order_acquire);
      node->work();
      node->work = nullptr;
      delete done;
      done = node;
    }
  }
};

}  // namespace jitkern

namespace {

struct Streams {
  std::mutex mutex;
  std::vector<CUstream> all;
};

CUstream add_stream(int device) {
  auto* stream = new CUstream_st(device);
  const std::lock_guard<std::mutex> lock(global<Streams>().mutex);
  global<Streams>().all.push_back(stream);
  return stream;
}

// Queues the work of a call of the driver.
CUresult queue(CUstream stream, std::function<void()> work) {
  if (current == nullptr || current->device != stream->device) {
    fake::fail_program("has another device's context current");
  }
  stream->put(std::move(work));
  return kCudaSuccess;
}

}  // namespace

namespace fake {

void fail_program(const std::string& what) {
  std::fprintf(stderr, "FAILED: the GPU %s\n", what.c_str());
  std::abort();
}
void require_memory(const void* at, i64 bytes, const char* what) {
  if (bytes == 0 || memories().find(reinterpret_cast<u64>(at), bytes).second.type != 0) return;
  fail_program(std::string("touches what is no memory of it: ") + what);
}

void Point::set() {
  is_set_.store(1, std::memory_order_release);
  syscall(SYS_futex, &is_set_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
void Point::wait() const {
  while (!is_set()) syscall(SYS_futex, &is_set_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
}

CUstream make_stream(int device) { return add_stream(device); }
int device_of(CUstream stream) { return stream->device; }
int current_device() {
  if (current == nullptr) fail_program("has no context current");
  return current->device;
}
bool is_capturing() { return has_capture; }
i64 num_events() { return living_events; }

void run_on(CUstream stream, std::function<void()> work) { stream->put(std::move(work)); }
std::shared_ptr<Point> hold(CUstream stream) {
  auto point = std::make_shared<Point>();
  stream->put([point] { point->wait(); });
  return point;
}
void synchronize(CUstream stream) {
  const auto reached = std::make_shared<Point>();
  stream->put([reached] { reached->set(); });
  reached->wait();
}
void synchronize_all() {
  std::vector<CUstream> streams;
  {
    const std::lock_guard<std::mutex> lock(global<Streams>().mutex);
    streams = global<Streams>().all;
  }
  for (const CUstream stream : streams) synchronize(stream);
}
void set_capturing(bool capturing) { has_capture = capturing; }

void know(const char* memory, i64 bytes, u32 type, int device) {
  memories().add(memory, {bytes, type, device});
}
void forget(const char* memory) { memories().forget(memory); }

}  // namespace fake

extern "C" {

static CUctx_st contexts[fake::kNumDevices];

CUresult cuInit(unsigned) { return 0; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, 0; }
CUresult cuDeviceGetCount(int* count) { return *count = fake::kNumDevices, 0; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, 0; }
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  return std::snprintf(name, static_cast<size_t>(length), "a fake GPU") < 0;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  *value = attribute == kAttributeComputeMajor ? 9 : attribute == kAttributeComputeMinor ? 0 : 132;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  contexts[device].device = device;
  return *context = &contexts[device], 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, 0;
}
CUresult cuCtxSynchronize() { return 0; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, 0; }
CUresult cuModuleLoadDataEx(CUmodule*, const void*, unsigned, int*, void**) { return kNoKernels; }
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*) { return kNoKernels; }
CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return kNoKernels; }
CUresult cuFuncGetAttribute(int*, int, CUfunction) { return kNoKernels; }
CUresult cuFuncSetAttribute(CUfunction, int, int) { return kNoKernels; }
CUresult cuLaunchKernelEx(const LaunchConfig*, CUfunction, void**, void**) { return kNoKernels; }
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  return queue(stream, [=] { std::memset(reinterpret_cast<void*>(at), value, bytes); });
}
static CUresult copy(void* to, const void* from, size_t bytes, CUstream stream) {
  fake::require_memory(to, static_cast<i64>(bytes), "the target of a copy");
  fake::require_memory(from, static_cast<i64>(bytes), "the source of a copy");
  return queue(stream, [=] {
    fake::require_memory(to, static_cast<i64>(bytes), "the target of a copy, freed since");
    std::memcpy(to, from, bytes);
  });
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr device, const void* host, size_t bytes, CUstream stream) {
  return copy(reinterpret_cast<void*>(device), host, bytes, stream);
}
CUresult cuMemcpyDtoHAsync_v2(void* host, CUdeviceptr device, size_t bytes, CUstream stream) {
  return copy(host, reinterpret_cast<const void*>(device), bytes, stream);
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes, stream);
}
CUresult cuMemcpy2DAsync_v2(const PitchedCopy*, CUstream) { return kNoKernels; }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  return *stream = add_stream(current->device), 0;
}
CUresult cuStreamIsCapturing(CUstream, int* status) { return *status = has_capture, 0; }
CUresult cuThreadExchangeStreamCaptureMode(int*) { return 0; }
CUresult cuEventCreate(CUevent* event, unsigned) {
  ++living_events;
  return *event = new CUevent_st(), 0;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  const auto point = std::make_shared<Point>();
  const CUresult result = queue(stream, [point] { point->set(); });
  if (result != kCudaSuccess) return result;
  const std::lock_guard<std::mutex> lock(event->mutex);
  event->point = point;
  return result;
}
static std::shared_ptr<Point> point_of(CUevent event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->point;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  const auto point = point_of(event);
  return queue(stream, [point] {
    if (point != nullptr) point->wait();
  });
}
CUresult cuEventQuery(CUevent event) {
  const auto point = point_of(event);
  return point == nullptr || point->is_set() ? kCudaSuccess : kCudaErrorNotReady;
}
CUresult cuEventElapsedTime(float* ms, CUevent, CUevent) { return *ms = 0, 0; }
CUresult cuEventDestroy_v2(CUevent event) {
  --living_events;
  return delete event, 0;
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*pointer, 0, bytes);
  memories().add(*pointer, {static_cast<i64>(bytes), kMemoryTypeHost, 0});
  return 0;
}
CUresult cuMemHostRegister_v2(void*, size_t, unsigned) { return 1; }
CUresult cuMemHostUnregister(void*) { return 1; }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* pointer, unsigned) {
  return *device = reinterpret_cast<CUdeviceptr>(pointer), 0;
}
CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** values, CUdeviceptr at) {
  const auto [begin, range] = memories().find(at, 1);
  if (range.type == 0 || current == nullptr) return 0;
  for (unsigned i = 0; i < count; ++i) {
    const int which = attributes[i];
    if (which == kPointerMemoryType) *static_cast<u32*>(values[i]) = range.type;
    if (which == kPointerDeviceOrdinal) *static_cast<int*>(values[i]) = range.ordinal;
    if (which == kPointerDevicePointer) *static_cast<CUdeviceptr*>(values[i]) = at;
    if (which == kPointerRangeStart) *static_cast<CUdeviceptr*>(values[i]) = begin;
    if (which == kPointerRangeSize) *static_cast<size_t*>(values[i]) = size_t(range.bytes);
  }
  return 0;
}
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "as the test wants", 0; }

}  // extern "C"
