// The memory of a PinnedPool: mapped on whole huge pages, touched by threads, registered with CUDA.
#include "host/method.h"
#include "host/pinned.h"
#include "host/workers.h"

#include <jitkern/launch.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr i64 kHugePageBytes = i64(2) << 20;
constexpr i64 kPageBytes = i64(4) << 10;
constexpr int kMadvPopulateWrite = 23;  // from Linux 5.14 on
constexpr int kPreferred = 1;           // of mbind

// Waits for all work of this process's GPUs, which may still read or write the memory.
void synchronize_devices() {
  const Driver& driver = Driver::get();
  int count = 0;
  JITKERN_CU(cuDeviceGetCount, &count);
  for (int ordinal = 0; ordinal < std::min(count, kMaxDevices); ++ordinal) {
    unsigned flags = 0;
    int active = 0;
    JITKERN_CU(cuDevicePrimaryCtxGetState, device_handle(ordinal), &flags, &active);
    if (active == 0) continue;
    const ContextScope scope(Device::get(ordinal));
    driver.check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  }
}

void* map(void* at, i64 bytes, int protection, int flags, int fd) {
  void* const found = mmap(at, static_cast<size_t>(bytes), protection, flags, fd, 0);
  if (found != MAP_FAILED) return found;
  throw tvm::ffi::Error(errno == ENOMEM ? "MemoryError" : "RuntimeError",
                        std::string("PinnedPool: mmap: ") + std::strerror(errno), "");
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

// It lives as long as a tensor of it, or the Python object that has made it. A forked child, which
// has both, leaves it alone: the driver does not survive a fork.
class PinnedMemory {
 public:
  // From a huge page on. Private memory a forked child does not get: its copy on write would move
  // the parent off the pages that the GPU knows.
  PinnedMemory(i64 num_bytes, int fd) : bytes_(num_bytes) {
    constexpr int kNobody = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    // Address space first, of which the part from the first huge page on is kept.
    const i64 reserved = bytes_ + kHugePageBytes;
    char* const first = static_cast<char*>(map(nullptr, reserved, PROT_NONE, kNobody, -1));
    const i64 skipped = static_cast<i64>(-address(first) % kHugePageBytes);
    const i64 whole = ceil_div(bytes_, kPageBytes) * kPageBytes;
    base_ = first + skipped;
    if (skipped > 0) munmap(first, static_cast<size_t>(skipped));
    munmap(base_ + whole, static_cast<size_t>(reserved - skipped - whole));
    const int kind = fd < 0 ? kNobody : MAP_SHARED;
    map(base_, bytes_, PROT_READ | PROT_WRITE, kind | MAP_FIXED, fd);
    madvise(base_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // where the kernel has them
    if (fd < 0) madvise(base_, static_cast<size_t>(bytes_), MADV_DONTFORK);
  }

  ~PinnedMemory() {
    if (getpid() != owner_) return;
    try {
      close();
    } catch (const tvm::ffi::Error&) {
      return;  // a graph is being captured, or the process ends: the memory stays until it does
    }
    if (is_known_) forget_pool(address(base_));
    munmap(base_, static_cast<size_t>(bytes_));
  }

  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* base() const { return base_; }

  // Prefers a NUMA node for a part that is not yet touched. Returns whether Linux does so.
  bool bind(i64 begin, i64 num_bytes, i64 node) {
    const unsigned long nodes = 1UL << node;
    return syscall(SYS_mbind, base_ + begin, num_bytes, kPreferred, &nodes, 8 * sizeof(nodes) + 1,
                   0) == 0;
  }

  // By as many threads, a huge page at a time. All threads exist before the first begins: 16 back 8
  // GiB at 32 to 37 GB/s, and at 6 to 20 if they start meanwhile. Returns errno.
  i64 touch(i64 begin, i64 num_bytes, i64 num_threads) {
    char* const base = base_ + begin;
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

  // For all GPUs, of which ops know from then on. RuntimeError in the driver's words.
  void register_it(i64 ordinal) {
    const Driver& driver = Driver::get();
    const ContextScope scope(Device::get(static_cast<int>(ordinal)));
    driver.check(driver.cuMemHostRegister_v2(base_, static_cast<size_t>(bytes_),
                                             kHostAllocPortable | kHostAllocDeviceMap),
                 "cuMemHostRegister");
    is_registered_ = true;
    const char* const device = memory_range(base_).device_address;
    is_known_ = device != nullptr;
    if (is_known_) add_pool(base_, bytes_, device);
  }

  // Waits for the GPUs and unregisters it; tensors keep the memory.
  void close() {
    if (!is_registered_ || getpid() != owner_) return;
    synchronize_devices();
    JITKERN_CU(cuMemHostUnregister, base_);
    is_registered_ = false;
    close_pool(base_);
  }

 private:
  const pid_t owner_ = getpid();
  const i64 bytes_;
  char* base_ = nullptr;
  bool is_registered_ = false;
  bool is_known_ = false;  // to ops
};

// Keeps the memory of a tensor.
struct Owner {
  std::shared_ptr<PinnedMemory> memory;

  void AllocData(DLTensor* tensor) { tensor->data = memory->base(); }
  void FreeData(DLTensor*) {}
};

// Bytes, private or of a descriptor: their tensor, and bind, touch, register and close of them.
Array<Any> make_pinned_memory(int64_t num_bytes, int64_t fd) {
  const auto made = std::make_shared<PinnedMemory>(num_bytes, static_cast<int>(fd));
  return {
      tvm::ffi::Tensor::FromNDAlloc(Owner{made}, {num_bytes}, DLDataType{kDLUInt, 8, 1},
                                    DLDevice{kDLCPU, 0}),
      method(made, &PinnedMemory::bind),
      method(made, &PinnedMemory::touch),
      method(made, &PinnedMemory::register_it),
      method(made, &PinnedMemory::close),
  };
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_pinned_memory, make_pinned_memory);

}  // namespace jitkern
