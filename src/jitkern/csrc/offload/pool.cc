// The memory of a PinnedPool: mapped on whole huge pages, touched by threads, registered with CUDA.
#include "host/objects.h"
#include "host/staging.h"

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
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr i64 kHugePageBytes = i64(2) << 20;
constexpr i64 kPageBytes = i64(4) << 10;
constexpr int kMadvPopulateWrite = 23;  // from Linux 5.14 on
constexpr int kPreferred = 1;           // MPOL_PREFERRED

// Waits for all work on a GPU. cuCtxSynchronize would break the captures of all threads: if one of
// the streams, all of torch's on the GPU, is being captured, waits for the others.
void synchronize_gpu(int ordinal, const Array<int64_t>& streams) {
  const ContextScope scope(Device::get(ordinal));
  const auto captures = [](int64_t stream) {
    return is_capturing(reinterpret_cast<CUstream>(stream));
  };
  if (std::none_of(streams.begin(), streams.end(), captures)) {
    JITKERN_CU(cuCtxSynchronize);
    return;
  }
  if (is_capturing(current_stream(ordinal))) {
    raise_error("RuntimeError", "close: a graph is captured on the current stream; close it later");
  }
  const RelaxedCapture relaxed;
  const CUevent event = make_event();
  for (const int64_t stream : streams) {
    if (captures(stream)) continue;
    record(event, reinterpret_cast<CUstream>(stream));
    wait_for(event);
  }
  destroy_event(event);
}

// Waits for all work on this process's GPUs, which may still access the memory.
void synchronize_gpus(int ordinal_of_streams, const Array<int64_t>& streams) {
  int count = 0;
  JITKERN_CU(cuDeviceGetCount, &count);
  for (int ordinal = 0; ordinal < std::min(count, kMaxDevices); ++ordinal) {
    unsigned flags = 0;
    int active = 0;
    JITKERN_CU(cuDevicePrimaryCtxGetState, device_handle(ordinal), &flags, &active);
    if (active == 0) continue;
    synchronize_gpu(ordinal, ordinal == ordinal_of_streams ? streams : Array<int64_t>());
  }
}

void* map(void* at, i64 bytes, int protection, int flags, int fd) {
  void* const mapped = mmap(at, static_cast<size_t>(bytes), protection, flags, fd, 0);
  if (mapped != MAP_FAILED) return mapped;
  raise_error(errno == ENOMEM ? "MemoryError" : "RuntimeError",
              str("PinnedPool: mmap: ", std::strerror(errno)));
}

// Makes Linux back [base, base + num_bytes) with pages and keeps the content. Returns errno.
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

// Lives as long as its tensors and its Python object. A forked child releases nothing: the driver
// does not survive a fork.
class PinnedMemory {
 public:
  // Starts at a huge page. A forked child does not get private memory: copy on write would move the
  // parent to other pages than those registered with the GPU.
  PinnedMemory(i64 num_bytes, int fd) : bytes_(num_bytes) {
    constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    // One huge page more than needed, for the alignment.
    reserved_ = static_cast<char*>(map(nullptr, reserved_bytes(), PROT_NONE, kPrivate, -1));
    base_ = reserved_ + -address(reserved_) % kHugePageBytes;
    const int kind = fd < 0 ? kPrivate : MAP_SHARED;
    map(base_, bytes_, PROT_READ | PROT_WRITE, kind | MAP_FIXED, fd);
    madvise(base_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // if Linux has them
    if (fd < 0) madvise(base_, static_cast<size_t>(bytes_), MADV_DONTFORK);
  }

  ~PinnedMemory() {
    if (getpid() != owner_) return;
    try {
      close();
    } catch (const tvm::ffi::Error&) {
      return;  // during a capture, or at the end of the process: the memory stays
    }
    munmap(reserved_, static_cast<size_t>(reserved_bytes()));
  }

  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* base() const { return base_; }

  // Sets the preferred NUMA node of an untouched part. Returns whether Linux accepts it.
  bool bind(i64 begin, i64 num_bytes, i64 node) {
    const unsigned long nodes = 1UL << node;
    return syscall(SYS_mbind, base_ + begin, num_bytes, kPreferred, &nodes, 8 * sizeof(nodes) + 1,
                   0) == 0;
  }

  // Touches a part with `num_threads`, a huge page at a time. Returns errno. All threads start
  // before the first works: 16 back 8 GiB at 32 to 37 GB/s, otherwise at 6 to 20.
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
    std::mutex start;  // held until all threads are started
    std::unique_lock<std::mutex> lock(start);
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(num_threads));
    try {
      while (static_cast<i64>(threads.size()) < num_threads - 1) {
        threads.emplace_back([&] {
          start.lock();
          start.unlock();
          touch();
        });
      }
    } catch (const std::system_error&) {  // no more threads: fewer will do
    }
    lock.unlock();
    touch();
    for (std::thread& thread : threads) thread.join();
    return error;
  }

  // Registers the memory for all GPUs. RuntimeError with the driver's text.
  void register_it(int ordinal, Array<int64_t> streams) {
    ordinal_ = ordinal;
    streams_ = std::move(streams);
    const Driver& driver = Driver::get();
    const ContextScope scope(Device::get(ordinal));
    driver.check(driver.cuMemHostRegister_v2(base_, static_cast<size_t>(bytes_),
                                             kHostAllocPortable | kHostAllocDeviceMap),
                 "cuMemHostRegister");
    is_registered_ = true;
  }

  // Waits for the GPUs and unregisters the memory; tensors keep it.
  void close() {
    if (!is_registered_ || getpid() != owner_) return;
    synchronize_gpus(ordinal_, streams_);
    const RelaxedCapture relaxed;  // another thread may capture
    JITKERN_CU(cuMemHostUnregister, base_);
    is_registered_ = false;
    ++num_pools_closed;
  }

 private:
  i64 reserved_bytes() const { return bytes_ + kHugePageBytes; }

  const pid_t owner_ = getpid();
  const i64 bytes_;
  char* reserved_ = nullptr;
  char* base_ = nullptr;
  bool is_registered_ = false;
  int ordinal_ = -1;
  Array<int64_t> streams_;
};

// Returns a tensor of bytes, private or backed by a file descriptor, and bind, touch, register and
// close.
Array<Any> make_pinned_memory(i64 num_bytes, int fd) {
  const auto memory = std::make_shared<PinnedMemory>(num_bytes, fd);
  return {
      tensor_of(memory, memory->base(), num_bytes, {kDLCPU, 0}),
      method(memory, &PinnedMemory::bind),
      method(memory, &PinnedMemory::touch),
      method(memory, &PinnedMemory::register_it),
      method(memory, &PinnedMemory::close),
  };
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_pinned_memory, make_pinned_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(synchronize_gpu, synchronize_gpu);

}  // namespace jitkern
