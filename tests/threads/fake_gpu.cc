#include <semaphore.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "fake_gpu.h"

namespace {

using fake::i64;
using fake::Point;
using namespace jitkern;

// Kept for good, as its threads are.
template <class T>
T& global() {
  static T* one = new T();
  return *one;
}

std::atomic<bool> has_capture{false};
std::atomic<i64> living_events{0};

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
void Point::wait() const {
  while (!is_set) usleep(100);
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
void synchronize(CUstream stream) {
  const auto reached = std::make_shared<Point>();
  stream->put([reached] { reached->is_set = true; });
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

}  // namespace fake

extern "C" {

static CUctx_st contexts[fake::kNumDevices];

CUresult cuInit(unsigned) { return 0; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, 0; }
CUresult cuDeviceGetCount(int* count) { return *count = fake::kNumDevices, 0; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, 0; }
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
// What a communicator does not call.
#define NOT_CALLED(name) \
  CUresult name() { return 801; }  // "operation not supported"
NOT_CALLED(cuModuleLoadDataEx)
NOT_CALLED(cuModuleGetFunction)
NOT_CALLED(cuModuleGetGlobal_v2)
NOT_CALLED(cuFuncGetAttribute)
NOT_CALLED(cuFuncSetAttribute)
NOT_CALLED(cuLaunchKernelEx)
NOT_CALLED(cuMemsetD8Async)
NOT_CALLED(cuMemcpyHtoDAsync_v2)
NOT_CALLED(cuMemcpyDtoHAsync_v2)
NOT_CALLED(cuMemcpyAsync)
NOT_CALLED(cuMemcpy2DAsync_v2)
NOT_CALLED(cuStreamCreateWithPriority)
NOT_CALLED(cuEventElapsedTime)
NOT_CALLED(cuMemHostRegister_v2)
NOT_CALLED(cuMemHostUnregister)
NOT_CALLED(cuPointerGetAttributes)

CUresult cuStreamIsCapturing(CUstream, int* status) { return *status = has_capture, 0; }
CUresult cuThreadExchangeStreamCaptureMode(int*) { return 0; }
CUresult cuEventCreate(CUevent* event, unsigned) {
  ++living_events;
  return *event = new CUevent_st(), 0;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  const auto point = std::make_shared<Point>();
  const CUresult result = queue(stream, [point] { point->is_set = true; });
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
  return point == nullptr || point->is_set ? kCudaSuccess : kCudaErrorNotReady;
}
CUresult cuEventDestroy_v2(CUevent event) {
  --living_events;
  return delete event, 0;
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  return *pointer = std::calloc(1, bytes), 0;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* pointer, unsigned) {
  return *device = reinterpret_cast<CUdeviceptr>(pointer), 0;
}
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "as the test wants", 0; }

}  // extern "C"
