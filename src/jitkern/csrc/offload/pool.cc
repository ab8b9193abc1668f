// The memory of a PinnedPool: mapped on whole huge pages, touched by threads, registered with CUDA.
// It lives as long as a tensor of it: the last one unregisters it and gives it back, in the process
// that mapped it and not in a forked child.
#include "host/pinned.h"
#include "host/workers.h"

#include <jitkern/launch.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <tvm/ffi/error.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace jitkern {

namespace {

constexpr i64 kHugePageBytes = i64(2) << 20;
constexpr i64 kPageBytes = i64(4) << 10;
constexpr int kMadvPopulateWrite = 23;  // from Linux 5.14 on

struct Memory {
  u64 number;  // no other mapping of this process, or of one that it was forked from, has it
  char* base;
  i64 bytes;
  std::vector<char*> pieces;  // registered, each by its first byte
};

std::mutex memories_mutex;
std::unordered_map<u64, Memory>& memories() {
  static auto* all = new std::unordered_map<u64, Memory>();  // tensors may outlive static objects
  return *all;
}

std::string errno_text(const char* what) {
  return std::string("PinnedPool: ") + what + ": " + std::strerror(errno);
}

[[noreturn]] void raise_errno(const char* what) {
  const bool memory = errno == ENOMEM || errno == ENOSPC;
  throw tvm::ffi::Error(memory ? "MemoryError" : "RuntimeError", errno_text(what), "");
}

// Waits for all work of this process's GPUs, which may still read or write the memory.
void synchronize_devices() {
  const Driver& driver = Driver::get();
  int count = 0;
  driver.check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < std::min(count, kMaxDevices); ++ordinal) {
    CUdevice handle = 0;
    unsigned flags = 0;
    int active = 0;
    driver.check(driver.cuDeviceGet(&handle, ordinal), "cuDeviceGet");
    driver.check(driver.cuDevicePrimaryCtxGetState(handle, &flags, &active),
                 "cuDevicePrimaryCtxGetState");
    if (active == 0) continue;
    const ContextScope scope(Device::get(ordinal));
    driver.check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  }
}

void unregister(Memory& memory) {
  if (memory.pieces.empty()) return;
  synchronize_devices();
  const Driver& driver = Driver::get();
  while (!memory.pieces.empty()) {
    driver.check(driver.cuMemHostUnregister(memory.pieces.back()), "cuMemHostUnregister");
    memory.pieces.pop_back();
  }
}

// What a tensor of the memory gives back when it is the last one.
struct Mapping {
  u64 number;

  void AllocData(DLTensor* tensor, char* base) { tensor->data = base; }
  void FreeData(DLTensor* tensor) {
    const u64 base = address(tensor->data);
    const std::lock_guard<std::mutex> lock(memories_mutex);
    const auto found = memories().find(base);
    // A forked child has the tensor and not the memory; another pool may lie there by now.
    if (found == memories().end() || found->second.number != number) return;
    Memory& memory = found->second;
    try {
      unregister(memory);
    } catch (const tvm::ffi::Error&) {
      return;  // a graph is being captured, or the process ends: the memory stays until it does
    }
    forget_pool(base);
    munmap(memory.base, static_cast<size_t>(memory.bytes));
    memories().erase(found);
  }
};

Memory& memory_at(int64_t base) {
  const auto found = memories().find(static_cast<u64>(base));
  if (found == memories().end()) {
    throw tvm::ffi::Error("RuntimeError", "PinnedPool: no memory of this process", "");
  }
  return found->second;
}

void forget_in_child() {
  // Its copies of the tensors must not unmap what the child has mapped there meanwhile, nor ask a
  // driver that does not survive a fork. The mutex may be held by a thread that is gone.
  new (&memories_mutex) std::mutex;
  memories().clear();
  forget_all_pools();
}

// Bytes of memory from a huge page on: private, which a forked child does not get (its copy on
// write would move the parent off the pages that the GPU knows), or of `fd`, which is shared.
tvm::ffi::Tensor pool_map(int64_t num_bytes, int64_t fd) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
  const size_t bytes = static_cast<size_t>(num_bytes);
  const size_t reserved = bytes + kHugePageBytes;
  // Address space first, of which the part from the first huge page on is kept.
  void* space =
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) raise_errno("mmap");
  char* const first = static_cast<char*>(space);
  const i64 skipped = static_cast<i64>(-address(first) % kHugePageBytes);
  char* const base = first + skipped;
  const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED, static_cast<int>(fd), 0) ==
      MAP_FAILED) {
    const int error = errno;
    munmap(space, reserved);
    errno = error;
    raise_errno("mmap");
  }
  const size_t pages = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (skipped > 0) munmap(first, static_cast<size_t>(skipped));
  munmap(base + pages, reserved - static_cast<size_t>(skipped) - pages);
  madvise(base, bytes, MADV_HUGEPAGE);  // refused where the kernel has none; smaps tell
  if (fd < 0) madvise(base, bytes, MADV_DONTFORK);
  static std::atomic<u64> made{0};
  const u64 number = ++made;
  {
    const std::lock_guard<std::mutex> lock(memories_mutex);
    memories()[address(base)] = {number, base, num_bytes, {}};
  }
  return tvm::ffi::Tensor::FromNDAlloc(Mapping{number}, {num_bytes}, DLDataType{kDLUInt, 8, 1},
                                       DLDevice{kDLCPU, 0}, base);
}

// Binds pages that are not yet touched to the nodes of `mask`: the first of them preferred, all of
// them in turn, or none but them. Returns errno, 0 if all is well.
int64_t pool_bind(int64_t base, int64_t num_bytes, int64_t mode, int64_t mask) {
  const unsigned long nodes = static_cast<unsigned long>(mask);
  const long failed = syscall(SYS_mbind, base, num_bytes, mode, &nodes, 8 * sizeof(nodes) + 1, 0);
  return failed == 0 ? 0 : errno;
}

// Makes the kernel back [base, base + num_bytes), which stays as it is, with memory. Returns errno.
int populate(char* base, i64 num_bytes) {
  while (madvise(base, static_cast<size_t>(num_bytes), kMadvPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (i64 at = 0; at < num_bytes; at += kPageBytes) {  // an older kernel
      __atomic_fetch_or(base + at, 0, __ATOMIC_RELAXED);
    }
    return 0;
  }
  return 0;
}

// By as many threads, a huge page at a time. All threads exist before the first begins: 16 back 8
// GiB at 32 to 37 GB/s, and at 6 to 20 if they start meanwhile. Returns errno.
int64_t pool_touch(int64_t base_arg, int64_t num_bytes, int64_t num_threads) {
  char* const base = reinterpret_cast<char*>(base_arg);
  std::atomic<i64> taken{0};
  std::atomic<int> error{0};
  const auto touch = [&] {
    for (i64 at; error == 0 && (at = taken.fetch_add(kHugePageBytes)) < num_bytes;) {
      if (const int failed = populate(base + at, std::min(kHugePageBytes, num_bytes - at))) {
        error = failed;
      }
    }
  };
  {
    Workers others(num_threads - 1, touch);
    others.wake();
    touch();
  }
  return error;
}

// Registers one piece of the memory for all GPUs. RuntimeError in the driver's words.
void pool_register(int64_t base, int64_t begin, int64_t num_bytes, int64_t ordinal) {
  const std::lock_guard<std::mutex> lock(memories_mutex);
  Memory& memory = memory_at(base);
  const Driver& driver = Driver::get();
  const ContextScope scope(Device::get(static_cast<int>(ordinal)));
  char* const piece = memory.base + begin;
  driver.check(driver.cuMemHostRegister_v2(piece, static_cast<size_t>(num_bytes),
                                           kHostAllocPortable | kHostAllocDeviceMap),
               "cuMemHostRegister");
  memory.pieces.push_back(piece);
}

// Tells the ops where GPUs find the memory, all of which is registered by now.
void pool_open(int64_t base, int64_t ordinal) {
  const std::lock_guard<std::mutex> lock(memories_mutex);
  const Memory& memory = memory_at(base);
  const ContextScope scope(Device::get(static_cast<int>(ordinal)));  // without one all is unknown
  const char* const device = memory_range(memory.base).device_address;
  if (device == nullptr) return;
  for (const char* piece : memory.pieces) {
    // Where the GPU's addresses do not follow each other, ops ask the driver.
    if (memory_range(piece).device_address != device + (piece - memory.base)) return;
  }
  add_pool(memory.base, memory.bytes, device, memory.pieces);
}

// Waits for the GPUs and unregisters what is registered; tensors keep their memory.
void pool_close(int64_t base) {
  const std::lock_guard<std::mutex> lock(memories_mutex);
  Memory& memory = memory_at(base);
  unregister(memory);
  close_pool(memory.base);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_map, pool_map);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_bind, pool_bind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_touch, pool_touch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_register, pool_register);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_open, pool_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_close, pool_close);

}  // namespace jitkern
