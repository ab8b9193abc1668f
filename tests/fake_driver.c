// A libcuda.so.1 without a GPU behind it: it writes down what it is asked for, one line each, so
// that the way to a launch can be tested anywhere. FAKE_GPUS (2) devices of FAKE_ARCH (90). With
// fake_vmm.c it has virtual memory management as well.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;

struct Attribute {
  int id, padding;
  unsigned value[16];
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  struct Attribute* attributes;
  unsigned count;
};
struct Function {
  char name[64];
  int module, threads, fixed_threads;
  size_t bytes;
};
struct Memory {
  uint64_t begin, bytes;
  unsigned type;
  int ordinal;
};

static char text[1 << 16];
static size_t used;
static struct Function functions[64];
static struct Memory memories[16];
static int num_functions, num_memories, num_modules;
static void* current;

static void say(const char* format, ...) {
  va_list list;
  va_start(list, format);
  used += (size_t)vsnprintf(text + used, sizeof(text) - used, format, list);
  va_end(list);
}

// What tests call: the lines since the last call, memory that the driver knows, and of the kernels
// of this name that are loaded later on the bytes of their parameter and their launch bound.
const char* fake_log(void) {
  static char copy[sizeof(text)];
  memcpy(copy, text, used);
  copy[used] = 0;
  used = 0;
  return copy;
}
void fake_memory(uint64_t begin, uint64_t bytes, unsigned type, int ordinal) {
  if (num_memories == sizeof(memories) / sizeof(memories[0])) abort();
  memories[num_memories++] = (struct Memory){begin, bytes, type, ordinal};
}
// These addresses are new ones: what tests named there has been freed.
void fake_memory_anew(uint64_t begin, uint64_t bytes) {
  for (int i = num_memories - 1; i >= 0; --i) {
    if (begin >= memories[i].begin + memories[i].bytes) continue;
    if (memories[i].begin >= begin + bytes) continue;
    memories[i] = memories[--num_memories];
  }
}
static struct Function expected[16];
static int num_expected;
void fake_kernel(const char* name, uint64_t bytes, int threads) {
  struct Function* one = &expected[num_expected++];
  snprintf(one->name, sizeof(one->name), "%s", name);
  one->bytes = bytes;
  one->threads = threads;
}
// And the kNumThreads of the last one.
void fake_block(int threads) { expected[num_expected - 1].fixed_threads = threads; }

// An allocator of device memory for tvm-ffi, which gives nothing back: a test may look at it.
struct Tensor {
  void* data;
  int device[2], ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct Managed {
  unsigned version[2];
  void* context;
  void (*deleter)(struct Managed*);
  uint64_t flags;
  struct Tensor tensor;
};
static void leave(struct Managed* managed) { (void)managed; }
int fake_allocate(struct Tensor* like, struct Managed** out, void* context, void* set_error) {
  (void)context, (void)set_error;
  struct Managed* one = calloc(1, sizeof(struct Managed));
  *one = (struct Managed){{1, 1}, NULL, leave, 0, *like};
  int64_t items = 1;
  one->tensor.shape = calloc(2 * (size_t)like->ndim, sizeof(int64_t));
  one->tensor.strides = one->tensor.shape + like->ndim;
  for (int d = like->ndim - 1; d >= 0; --d) {
    one->tensor.shape[d] = like->shape[d];
    one->tensor.strides[d] = items;
    items *= like->shape[d];
  }
  const size_t bytes = (size_t)(items * like->bits / 8);
  say("allocate %zu\n", bytes);
  one->tensor.data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *out = one;
  return 0;
}

int fake_setting(const char* name, int otherwise) {
  const char* given = getenv(name);
  return given != NULL ? atoi(given) : otherwise;
}
int fake_gpu_count(void) { return fake_setting("FAKE_GPUS", 2); }
CUresult cuInit(unsigned flags) { return flags != 0; }
CUresult cuDriverGetVersion(int* version) {
  return *version = fake_setting("FAKE_DRIVER", 13000), 0;
}
CUresult cuDeviceGetCount(int* count) { return *count = fake_gpu_count(), 0; }
CUresult cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal >= fake_gpu_count();
}
CUresult cuDeviceGetName(char* name, int length, int device) {
  return snprintf(name, (size_t)length, "Fake GPU"), device >= fake_gpu_count();
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int arch = fake_setting("FAKE_ARCH", 90);
  *value = attribute == 75 ? arch / 10 : attribute == 76 ? arch % 10 : attribute == 97 ? 232448 : 8;
  if (attribute == 11) *value = fake_setting("FAKE_MAX_PITCH", 0x7fffffff);
  if (attribute == 102 || attribute == 103) *value = getenv("FAKE_NO_VMM") == NULL;
  return device >= fake_gpu_count();
}
CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = (void*)(intptr_t)(device + 1), 0;
}
CUresult cuCtxGetCurrent(void** context) { return *context = current, 0; }
CUresult cuCtxSetCurrent(void* context) { return current = context, 0; }
CUresult cuModuleLoadDataEx(void** module, const void* image, unsigned n, int* o, void** v) {
  (void)n, (void)o, (void)v;
  *module = (void*)(intptr_t)(++num_modules);
  say("module %d on %d\n", num_modules, (int)(intptr_t)current - 1);
  return image == NULL;
}
CUresult cuModuleGetFunction(struct Function** function, void* module, const char* name) {
  struct Function* one = &functions[num_functions++];
  *one = (struct Function){.threads = 1024};
  for (int i = 0; i < num_expected; ++i) {
    if (strcmp(expected[i].name, name) == 0) *one = expected[i];
  }
  snprintf(one->name, sizeof(one->name), "%s", name);
  one->module = (int)(intptr_t)module;
  *function = one;
  return 0;
}
CUresult cuModuleGetGlobal_v2(uint64_t* pointer, size_t* bytes, void* module, const char* name) {
  (void)module;
  *pointer = 0;
  *bytes = 1;
  for (int i = 0; i < num_expected; ++i) {
    const char* kernel = name + strlen("jitkern_threads_");
    if (strcmp(expected[i].name, kernel) == 0) *bytes = (size_t)expected[i].fixed_threads + 1;
  }
  return strncmp(name, "jitkern_threads_", strlen("jitkern_threads_")) != 0;
}
CUresult cuFuncGetAttribute(int* value, int attribute, struct Function* function) {
  *value = attribute == 0 ? function->threads : attribute == 1 ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(struct Function* function, int attribute, int value) {
  say("%s: attribute %d = %d\n", function->name, attribute, value);
  return 0;
}
#ifndef OLD_DRIVER
CUresult cuFuncGetParamInfo(struct Function* function, size_t number, size_t* at, size_t* bytes) {
  *at = 0;
  *bytes = function->bytes;
  return number != 0 || *bytes == 0;
}
#endif
CUresult cuLaunchKernelEx(const struct Config* c, struct Function* function, void** params,
                          void** extra) {
  (void)extra;
  say("%s of %d: grid %u,%u,%u block %u,%u,%u shared %u stream %llu", function->name,
      function->module, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
      c->shared, (unsigned long long)(uintptr_t)c->stream);
  for (unsigned i = 0; i < c->count; ++i) {
    say(" %d=%u", c->attributes[i].id, c->attributes[i].value[0]);
    if (c->attributes[i].id != 4) continue;
    say(",%u,%u", c->attributes[i].value[1], c->attributes[i].value[2]);
  }
  say(" ");
  for (size_t i = 0; i < function->bytes; ++i) say("%02x", ((unsigned char*)params[0])[i]);
  say("\n");
  return 0;
}
int fake_vmm_holds(uint64_t at, size_t bytes);
CUresult cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void* stream) {
  (void)stream;
  if (fake_vmm_holds(at, bytes)) memset((void*)(uintptr_t)at, value, bytes);
  return say("memset %u, %zu\n", value, bytes), 0;
}
// Copies are done at once.
static CUresult copy(const char* what, void* to, const void* from, size_t bytes, void* stream) {
  say("%s %zu on %llu\n", what, bytes, (unsigned long long)(uintptr_t)stream);
  return memcpy(to, from, bytes), 0;
}
// What a test looks at, or changes, before each copy to the device.
static void (*before_h2d)(const void* host, size_t bytes);
void fake_before_h2d(void (*hook)(const void*, size_t)) { before_h2d = hook; }
CUresult cuMemcpyHtoDAsync_v2(uint64_t device, const void* host, size_t bytes, void* stream) {
  if (before_h2d != NULL) before_h2d(host, bytes);
  return copy("h2d", (void*)(uintptr_t)device, host, bytes, stream);
}
CUresult cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void* stream) {
  return copy("d2h", host, (void*)(uintptr_t)device, bytes, stream);
}
CUresult cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void* stream) {
  return copy("copy", (void*)(uintptr_t)dst, (void*)(uintptr_t)src, bytes, stream);
}
struct Side {
  size_t x, y;
  int type;
  void* host;
  uint64_t device;
  void* array;
  size_t pitch;
};
struct Copy2D {
  struct Side src, dst;
  size_t width, height;
};
// The addresses as well: a test compares what arrives.
CUresult cuMemcpy2DAsync_v2(const struct Copy2D* c, void* stream) {
  const struct Side *s = &c->src, *d = &c->dst;
  if (s->pitch < c->width || d->pitch < c->width || s->x || s->y || d->x || d->y) return 1;
  const char* from = s->type == 1 ? s->host : (const char*)(uintptr_t)s->device;
  char* to = d->type == 1 ? d->host : (char*)(uintptr_t)d->device;
  for (size_t i = 0; i < c->height; ++i) memcpy(to + i * d->pitch, from + i * s->pitch, c->width);
  say("copy %zu x %zu, pitches %zu %zu, types %d %d, on %llu\n", c->height, c->width, d->pitch,
      s->pitch, d->type, s->type, (unsigned long long)(uintptr_t)stream);
  return 0;
}
struct CopyAttributes {
  int order, hints[4];
  unsigned flags;
};
CUresult cuMemcpyBatchAsync(uint64_t* dst, uint64_t* src, size_t* bytes, size_t count,
                            struct CopyAttributes* attributes, size_t* first_of_each,
                            size_t num_attributes, size_t* failed, void* stream) {
  if (num_attributes != 1 || *first_of_each != 0 || attributes->order != 1 || count == 0) return 1;
  if ((uintptr_t)stream <= 2) return 1;
  (void)failed;
  say("batch");
  for (size_t i = 0; i < count; ++i) {
    memcpy((void*)(uintptr_t)dst[i], (const void*)(uintptr_t)src[i], bytes[i]);
    say(" %zu", bytes[i]);
  }
  say(" on %llu\n", (unsigned long long)(uintptr_t)stream);
  return 0;
}
CUresult cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  return *stream = malloc(1), 0;
}
// Streams as clocks: work takes the time that a test gives it, a record notes the stream's time, a
// wait moves it on. What a test traces is one line for each. A capture takes the streams that wait
// for its events, and no others' events.
struct Stream {
  void* handle;
  double ms;
  int capture;  // its number, 0: none
};
struct Event {
  unsigned flags;
  int number, capture, is_recorded;
  double ms;
};
static struct Stream streams[64];
static int num_streams, num_events, num_destroyed, capture, num_captures;
static double now_ms = 1e30;
static FILE* trace;
static char* traced;
static size_t traced_bytes;
static struct Stream* stream_of(void* handle) {
  for (int i = 0; i < num_streams; ++i) {
    if (streams[i].handle == handle) return &streams[i];
  }
  streams[num_streams] = (struct Stream){.handle = handle};
  return &streams[num_streams++];
}
static void note(const char* what, struct Stream* stream, const struct Event* event) {
  if (trace == NULL) return;
  const int handle = (int)(intptr_t)stream->handle;
  fprintf(trace, "%s %d %d %d\n", what, handle, stream->capture, event->number);
}
// The lines since the last call, which begins the trace.
const char* fake_trace(void) {
  static char* last;
  free(last);
  if (trace != NULL) fclose(trace);
  last = traced;
  traced = NULL;
  trace = open_memstream(&traced, &traced_bytes);
  return last != NULL ? last : "";
}
void fake_note(void* stream, const char* text) {
  const int in = stream_of(stream)->capture;
  if (trace != NULL) fprintf(trace, "note %d %d %s\n", (int)(intptr_t)stream, in, text);
}
void fake_work(void* stream, double ms) { stream_of(stream)->ms += ms; }
double fake_time(void* stream) { return stream_of(stream)->ms; }
void fake_now(double ms) { now_ms = ms; }
int fake_events(void) { return num_events - num_destroyed; }
int fake_capture_of(void* stream, int begins) {
  if (begins) stream_of(stream)->capture = capture = ++num_captures;
  int count = 0;
  for (int i = 0; i < num_streams; ++i) count += streams[i].capture != 0;
  if (begins) return count;
  for (int i = 0; i < num_streams; ++i) streams[i].capture = 0;
  return capture = 0, count;
}
CUresult cuStreamWaitEvent(void* stream, void* given, unsigned flags) {
  (void)flags;
  struct Stream* waits = stream_of(stream);
  struct Event* event = given;
  if (!event->is_recorded) return 0;
  if (event->capture != 0 && event->capture != capture) return 1;
  if (waits->capture != 0 && event->capture == 0) return 905;  // isolation
  if (event->capture != 0) waits->capture = event->capture;
  note("wait", waits, event);
  if (event->ms > waits->ms) waits->ms = event->ms;
  return 0;
}
CUresult cuEventCreate(void** event, unsigned flags) {
  struct Event* made = calloc(1, sizeof(struct Event));
  *made = (struct Event){.flags = flags, .number = ++num_events};
  return *event = made, 0;
}
CUresult cuEventDestroy_v2(void* event) { return free(event), ++num_destroyed, 0; }
CUresult cuEventRecord(void* given, void* stream) {
  struct Event* event = given;
  note("record", stream_of(stream), event);
  event->ms = stream_of(stream)->ms;
  event->capture = stream_of(stream)->capture;
  return event->is_recorded = 1, 0;
}
CUresult cuEventQuery(void* given) {
  struct Event* event = given;
  if (event->capture != 0) return 907;
  return event->ms <= now_ms ? 0 : 600;
}
CUresult cuEventElapsedTime(float* ms, void* from, void* to) {
  struct Event *one = from, *other = to;
  if ((one->flags | other->flags) & 2 || one->capture != 0 || other->capture != 0) return 400;
  if (one->ms > now_ms || other->ms > now_ms) return 600;
  return *ms = (float)(other->ms - one->ms), 0;
}
CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  (void)flags;
  return *pointer = calloc(1, bytes), 0;
}
// The pinned pieces, as memory that the driver knows; the one after fake_refusal(n) more is
// refused.
static int until_refusal = -1;
void fake_refusal(int registrations) { until_refusal = registrations; }
CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  if (until_refusal == 0) return until_refusal = -1, 2;
  if (until_refusal > 0) --until_refusal;
  say("register %zu, flags %u, on %d\n", bytes, flags, (int)(intptr_t)current - 1);
  return fake_memory((uint64_t)(uintptr_t)pointer, bytes, 1, 0), 0;
}
CUresult cuMemHostUnregister(void* pointer) {
  for (int i = 0; i < num_memories; ++i) {
    if (memories[i].begin != (uint64_t)(uintptr_t)pointer || memories[i].type != 1) continue;
    say("unregister %zu\n", (size_t)memories[i].bytes);
    memories[i] = memories[--num_memories];
    return 0;
  }
  return 1;
}
// Whether a stream is being captured, which refuses every wait.
static int capturing;
void fake_capture(int is_capturing) { capturing = is_capturing; }
CUresult cuStreamIsCapturing(void* stream, int* status) {
  return *status = capturing || stream_of(stream)->capture != 0, 0;
}
CUresult cuCtxSynchronize(void) {
  if (capturing || capture != 0) return 900;
  return say("synchronize %d\n", (int)(intptr_t)current - 1), 0;
}
CUresult cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return *flags = 0, *active = device == 0, 0;
}
CUresult cuMemHostGetDevicePointer_v2(uint64_t* device, void* pointer, unsigned flags) {
  (void)flags;
  return *device = (uint64_t)(uintptr_t)pointer, 0;
}
int fake_vmm_ordinal(uint64_t at);
CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** values, uint64_t at) {
  if (current == NULL) return 0;  // as the real one: nothing is known
  const int of_vmm = fake_vmm_ordinal(at);
  const struct Memory mapped = {0, 0, 2, of_vmm};
  const struct Memory* one = of_vmm >= 0 ? &mapped : NULL;
  for (int i = 0; i < num_memories; ++i) {
    if (at >= memories[i].begin && at < memories[i].begin + memories[i].bytes) one = &memories[i];
  }
  for (unsigned a = 0; a < count && one != NULL; ++a) {
    if (attributes[a] == 2) *(unsigned*)values[a] = one->type;
    if (attributes[a] == 9) *(int*)values[a] = one->ordinal;
    if (attributes[a] == 3) *(uint64_t*)values[a] = at;
    if (attributes[a] == 11 && one != &mapped) *(uint64_t*)values[a] = one->begin;
    if (attributes[a] == 12 && one != &mapped) *(size_t*)values[a] = one->bytes;
  }
  return 0;
}
CUresult cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, 0; }
CUresult cuGetErrorName(CUresult error, const char** name) { return *name = "ERROR", error = 0; }
CUresult cuGetErrorString(CUresult error, const char** name) { return *name = "fake", error = 0; }
