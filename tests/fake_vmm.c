// The virtual memory management of fake_driver.c's libcuda, for real: memory of a "GPU" is a memfd
// that processes hand to each other, and addresses are mapped with mmap. What a caller does wrong
// is an error (1: invalid value), which the real one might not notice.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;

enum { NO_MEMORY = 2, PIECE = 2 << 20, MOST = 64 };

struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  struct Location location;
  void* windows;
  unsigned char flags[8];
};
struct Access {
  struct Location location;
  int flags;
};
struct Handle {
  int fd, is_released, gpu;  // the number of the GPU on the machine
  size_t bytes;
  int is_exportable;
};
struct Range {
  uint64_t begin;
  size_t bytes;
};
struct Mapping {
  struct Range range;
  int gpu, is_open;
  unsigned opened_to;  // a bit for each ordinal
};

static struct Handle handles[MOST];
static struct Range reserved[MOST];
static struct Mapping mappings[MOST];
static int num_handles, num_mistakes;
#define INVALID (++num_mistakes, 1)

int fake_setting(const char* name, int otherwise);
int fake_gpu_count(void);
// The ordinals of this process begin with this GPU of the machine, as CUDA_VISIBLE_DEVICES has it.
static int gpu_of(int ordinal) { return ordinal + fake_setting("FAKE_FIRST_GPU", 0); }
// Whether two GPUs of the machine reach each other: not those of FAKE_APART, such as "0,2".
static int reaches(int from, int to) {
  const char* given = getenv("FAKE_APART");
  int a = -1, b = -1;
  if (given == NULL || sscanf(given, "%d,%d", &a, &b) != 2) return 1;
  return !((from == a && to == b) || (from == b && to == a));
}

static int are_right(const struct Properties* p) {
  return p->type == 1 && p->location.type == 1 && p->location.id < fake_gpu_count() &&
         (p->handle_types == 0 || p->handle_types == 1) && p->windows == NULL;
}
static CUresult add_handle(uint64_t* handle, int fd, int gpu, int is_exportable) {
  struct stat found;
  if (num_handles == MOST || fstat(fd, &found) != 0) return INVALID;
  handles[num_handles] = (struct Handle){fd, 0, gpu, (size_t)found.st_size, is_exportable};
  return *handle = (uint64_t)++num_handles, 0;
}
static struct Handle* held(uint64_t handle) {
  if (handle == 0 || handle > (uint64_t)num_handles) return NULL;
  return handles[handle - 1].is_released ? NULL : &handles[handle - 1];
}

CUresult cuMemCreate(uint64_t* handle, size_t bytes, const struct Properties* p, uint64_t flags) {
  if (flags != 0 || bytes == 0 || bytes % PIECE != 0 || !are_right(p)) return INVALID;
  if (bytes > (size_t)fake_setting("FAKE_GPU_MIB", 1024) << 20) return NO_MEMORY;
  char name[32];
  snprintf(name, sizeof(name), "fake-gpu-%d", gpu_of(p->location.id));
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return NO_MEMORY;
  // Nobody has promised zeros.
  unsigned char* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return NO_MEMORY;
  memset(at, 0xa5, bytes);
  munmap(at, bytes);
  return add_handle(handle, fd, gpu_of(p->location.id), p->handle_types == 1);
}
CUresult cuMemRelease(uint64_t handle) {
  struct Handle* memory = held(handle);
  if (memory == NULL) return INVALID;
  return memory->is_released = 1, close(memory->fd), 0;
}
CUresult cuMemExportToShareableHandle(int* fd, uint64_t handle, int type, uint64_t flags) {
  struct Handle* memory = held(handle);
  if (memory == NULL || type != 1 || flags != 0 || !memory->is_exportable) return INVALID;
  *fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
  return *fd < 0;
}
CUresult cuMemImportFromShareableHandle(uint64_t* handle, void* shared, int type) {
  const int given = (int)(intptr_t)shared;
  char link[64], name[128] = "";
  snprintf(link, sizeof(link), "/proc/self/fd/%d", given);
  if (type != 1 || readlink(link, name, sizeof(name) - 1) < 0) return INVALID;
  int gpu = 0;
  if (sscanf(name, "/memfd:fake-gpu-%d", &gpu) != 1) return INVALID;
  return add_handle(handle, fcntl(given, F_DUPFD_CLOEXEC, 0), gpu, 1);
}

void fake_memory_anew(uint64_t begin, uint64_t bytes);
CUresult cuMemAddressReserve(uint64_t* at, size_t bytes, size_t align, uint64_t wanted,
                             uint64_t flags) {
  if (bytes == 0 || bytes % PIECE != 0 || align != 0 || wanted != 0 || flags != 0) return INVALID;
  char* space =
      mmap(NULL, bytes + PIECE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return NO_MEMORY;
  const size_t skipped = (size_t)(-(uintptr_t)space % PIECE);
  if (skipped > 0) munmap(space, skipped);
  munmap(space + skipped + bytes, PIECE - skipped);
  fake_memory_anew((uint64_t)(uintptr_t)(space + skipped), bytes);
  for (int i = 0; i < MOST; ++i) {
    if (reserved[i].bytes != 0) continue;
    reserved[i] = (struct Range){(uint64_t)(uintptr_t)(space + skipped), bytes};
    return *at = reserved[i].begin, 0;
  }
  return NO_MEMORY;
}
static int meet(const struct Range* range, uint64_t at, size_t bytes) {
  return range->bytes != 0 && at < range->begin + range->bytes && range->begin < at + bytes;
}
CUresult cuMemAddressFree(uint64_t at, size_t bytes) {
  for (int i = 0; i < MOST; ++i) {
    if (meet(&mappings[i].range, at, bytes)) return INVALID;  // unmap it first
  }
  for (int i = 0; i < MOST; ++i) {
    if (reserved[i].begin != at || reserved[i].bytes != bytes) continue;
    munmap((void*)(uintptr_t)at, bytes);
    return reserved[i].bytes = 0, 0;
  }
  return INVALID;
}
CUresult cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
  const struct Handle* memory = held(handle);
  if (memory == NULL || memory->bytes != bytes || offset != 0 || flags != 0 || at % PIECE != 0) {
    return INVALID;
  }
  int is_inside = 0;
  for (int i = 0; i < MOST; ++i) {
    if (meet(&mappings[i].range, at, bytes)) return INVALID;
    is_inside |= reserved[i].bytes != 0 && at >= reserved[i].begin &&
                 at + bytes <= reserved[i].begin + reserved[i].bytes;
  }
  if (!is_inside) return INVALID;
  void* to = (void*)(uintptr_t)at;
  // Nobody may touch it yet.
  if (mmap(to, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
    return INVALID;
  for (int i = 0; i < MOST; ++i) {
    if (mappings[i].range.bytes != 0) continue;
    mappings[i] = (struct Mapping){{at, bytes}, memory->gpu, 0, 0};
    return 0;
  }
  return NO_MEMORY;
}
CUresult cuMemUnmap(uint64_t at, size_t bytes) {
  for (int i = 0; i < MOST; ++i) {
    if (mappings[i].range.begin != at || mappings[i].range.bytes != bytes) continue;
    mmap((void*)(uintptr_t)at, bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mappings[i].range.bytes = 0, 0;
  }
  return INVALID;
}
CUresult cuMemSetAccess(uint64_t at, size_t bytes, const struct Access* access, size_t count) {
  for (int i = 0; i < MOST; ++i) {
    struct Mapping* mapping = &mappings[i];
    if (mapping->range.begin != at || mapping->range.bytes != bytes) continue;
    for (size_t a = 0; a < count; ++a) {
      if (access[a].location.type != 1 || access[a].flags != 3) return INVALID;
      if (access[a].location.id >= fake_gpu_count()) return 101;
      if (!reaches(gpu_of(access[a].location.id), mapping->gpu)) return 217;
    }
    if (count == 0) return INVALID;
    for (size_t a = 0; a < count; ++a) mapping->opened_to |= 1u << access[a].location.id;
    mapping->is_open = 1;
    return mprotect((void*)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE);
  }
  return INVALID;
}

static const struct Mapping* mapping_of(uint64_t at) {
  for (int i = 0; i < MOST; ++i) {
    if (meet(&mappings[i].range, at, 1)) return &mappings[i];
  }
  return NULL;
}
CUresult cuMemGetAccess(unsigned long long* flags, const struct Location* location, uint64_t at) {
  const struct Mapping* mapping = mapping_of(at);
  if (mapping == NULL || location->type != 1)
    return 1;  // other memory: asking for it is no mistake
  return *flags = mapping->opened_to >> location->id & 1 ? 3 : 0, 0;
}

// For fake_driver.c: the ordinal of the GPU that this memory is of, or -1.
int fake_vmm_ordinal(uint64_t at) {
  const struct Mapping* mapping = mapping_of(at);
  return mapping == NULL ? -1 : mapping->gpu - gpu_of(0);
}
// The same: whether a test may write there.
int fake_vmm_holds(uint64_t at, size_t bytes) {
  for (int i = 0; i < MOST; ++i) {
    const struct Range* range = &mappings[i].range;
    if (mappings[i].is_open && meet(range, at, bytes)) {
      return at >= range->begin && at + bytes <= range->begin + range->bytes;
    }
  }
  return 0;
}
// For tests: handles, mappings and reservations that are there; calls that were wrong.
void fake_vmm_counts(int counts[4]) {
  memset(counts, 0, 4 * sizeof(int));
  counts[3] = num_mistakes;
  for (int i = 0; i < num_handles; ++i) counts[0] += !handles[i].is_released;
  for (int i = 0; i < MOST; ++i) counts[1] += mappings[i].range.bytes != 0;
  for (int i = 0; i < MOST; ++i) counts[2] += reserved[i].bytes != 0;
}
