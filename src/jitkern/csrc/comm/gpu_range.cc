// The memory of a PeerMemory on GPUs: made by the driver's virtual memory management, never
// multicast.
#include <jitkern/launch.h>
#include <tvm/ffi/error.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "comm/peer_range.h"
#include "comm/vmm.h"

namespace jitkern {

namespace {

constexpr i64 kProbeBytes = 4096;

[[noreturn]] void raise(const char* kind, const std::string& message) {
  throw tvm::ffi::Error(kind, message, "");
}

// What small copies with a GPU go through, apart from all that torch has queued. It lives as long
// as the process.
struct Probe {
  std::mutex mutex;  // of a copy
  CUstream stream = nullptr;
  CUevent event = nullptr;
  char* pinned = nullptr;  // kProbeBytes: a copy from other memory would wait in the driver

  static Probe& of(int ordinal) {
    static std::mutex mutex;
    static std::array<Probe*, kMaxDevices> probes{};
    const std::lock_guard<std::mutex> lock(mutex);
    Probe*& found = probes[static_cast<size_t>(ordinal)];
    if (found == nullptr) {
      const Driver& driver = Driver::get();
      const RelaxedCapture relaxed;
      const ContextScope scope(Device::get(ordinal));
      auto made = std::make_unique<Probe>();
      driver.check(driver.cuStreamCreateWithPriority(&made->stream, kStreamNonBlocking,
                                                     kHighestStreamPriority),
                   "cuStreamCreateWithPriority");
      driver.check(driver.cuEventCreate(&made->event, kEventDisableTiming), "cuEventCreate");
      void* pinned = nullptr;
      driver.check(driver.cuMemHostAlloc(&pinned, kProbeBytes, kHostAllocPortable),
                   "cuMemHostAlloc");
      made->pinned = static_cast<char*>(pinned);
      found = made.release();
    }
    return *found;
  }
};

class GpuRange : public PeerRange {
 public:
  GpuRange(i64 size, i64 share_bytes, std::vector<int> ordinals)
      : PeerRange(size, share_bytes), ordinals_(std::move(ordinals)) {
    for (const int ordinal : ordinals_) {
      Device::get(ordinal);  // has a context, without which the driver maps nothing
      access_.push_back({{kVmmOnDevice, ordinal}, kVmmReadWrite});
    }
    CUdeviceptr begin = 0;
    const ContextScope scope(Device::get(ordinals_.front()));
    driver_.check(vmm_.cuMemAddressReserve(&begin, static_cast<size_t>(bytes()), 0, 0, 0),
                  "cuMemAddressReserve");
    base = reinterpret_cast<char*>(begin);
  }
  ~GpuRange() override { release(); }

  int create(i64 rank, int ordinal, bool is_exported) override {
    const ContextScope scope(Device::get(ordinal));
    const VmmProperties properties = vmm_properties(ordinal, is_exported);
    CUmemHandle handle = 0;
    const CUresult result =
        vmm_.cuMemCreate(&handle, static_cast<size_t>(share_bytes), &properties, 0);
    if (result == kCudaErrorOutOfMemory) {
      raise("MemoryError", "PeerMemory: GPU " + std::to_string(ordinal) + " has no " +
                               std::to_string(share_bytes) +
                               " bytes left; torch.cuda.empty_cache() gives back what PyTorch "
                               "keeps");
    }
    driver_.check(result, "cuMemCreate");
    const Held held{vmm_, handle};
    int fd = -1;
    if (is_exported) {
      driver_.check(vmm_.cuMemExportToShareableHandle(&fd, handle, kVmmAsFd, 0),
                    "cuMemExportToShareableHandle");
    }
    try {
      map_handle(rank, handle);
    } catch (...) {
      if (fd >= 0) ::close(fd);
      throw;
    }
    return fd;
  }

  void map(i64 rank, int fd) override {
    const ContextScope scope(Device::get(ordinals_.front()));
    CUmemHandle handle = 0;
    void* const shared = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    driver_.check(vmm_.cuMemImportFromShareableHandle(&handle, shared, kVmmAsFd),
                  "cuMemImportFromShareableHandle");
    const Held held{vmm_, handle};
    map_handle(rank, handle);
  }

  void write(i64 offset, const char* from, i64 bytes, int ordinal, double timeout_s) override {
    with_probe(bytes, ordinal, timeout_s, [&](Probe& probe) {
      std::memcpy(probe.pinned, from, static_cast<size_t>(bytes));
      return driver_.cuMemcpyHtoDAsync_v2(pointer(offset), probe.pinned, static_cast<size_t>(bytes),
                                          probe.stream);
    });
  }

  void read(i64 offset, char* to, i64 bytes, int ordinal, double timeout_s) override {
    with_probe(
        bytes, ordinal, timeout_s,
        [&](Probe& probe) {
          return driver_.cuMemcpyDtoHAsync_v2(probe.pinned, pointer(offset),
                                              static_cast<size_t>(bytes), probe.stream);
        },
        to);
  }

  void clear(i64 offset, i64 bytes, int ordinal, double timeout_s) override {
    with_probe(0, ordinal, timeout_s, [&](Probe& probe) {
      return driver_.cuMemsetD8Async(pointer(offset), 0, static_cast<size_t>(bytes), probe.stream);
    });
  }

  void release() noexcept override {
    if (base == nullptr) return;
    char* const begin = base;
    base = nullptr;
    if (!is_here() || is_busy_) return;
    try {
      // Kernels that use it may be queued: a tensor goes when Python drops it.
      for (const int ordinal : ordinals_) {
        const ContextScope scope(Device::get(ordinal));
        driver_.check(driver_.cuCtxSynchronize(), "cuCtxSynchronize");
      }
      const ContextScope scope(Device::get(ordinals_.front()));
      for (i64 rank = 0; rank < size; ++rank) {
        if (!is_mapped_[static_cast<size_t>(rank)]) continue;
        driver_.check(vmm_.cuMemUnmap(reinterpret_cast<CUdeviceptr>(begin + rank * share_bytes),
                                      static_cast<size_t>(share_bytes)),
                      "cuMemUnmap");
      }
      driver_.check(
          vmm_.cuMemAddressFree(reinterpret_cast<CUdeviceptr>(begin), static_cast<size_t>(bytes())),
          "cuMemAddressFree");
    } catch (const tvm::ffi::Error&) {
      // A graph is being captured, or the process ends: the memory stays until it does.
    }
  }

 private:
  // A handle for as long as it takes to map it: a mapping keeps the memory itself.
  struct Held {
    const Vmm& vmm;
    CUmemHandle handle;
    ~Held() { vmm.cuMemRelease(handle); }
  };

  CUdeviceptr pointer(i64 offset) const { return reinterpret_cast<CUdeviceptr>(base + offset); }

  void map_handle(i64 rank, CUmemHandle handle) {
    const CUdeviceptr at = pointer(rank * share_bytes);
    const size_t length = static_cast<size_t>(share_bytes);
    driver_.check(vmm_.cuMemMap(at, length, 0, handle, 0), "cuMemMap");
    is_mapped_[static_cast<size_t>(rank)] = true;
    driver_.check(vmm_.cuMemSetAccess(at, length, access_.data(), access_.size()),
                  "cuMemSetAccess");
  }

  // Queues what `queue` does, and waits for it: polled, since a GPU may hang.
  template <class Queue>
  void with_probe(i64 bytes, int ordinal, double timeout_s, const Queue& queue,
                  char* to = nullptr) {
    if (bytes > kProbeBytes) raise("ValueError", "PeerMemory: more than 4096 bytes at once");
    Probe& probe = Probe::of(ordinal);
    const std::lock_guard<std::mutex> lock(probe.mutex);
    const ContextScope scope(Device::get(ordinal));
    driver_.check(queue(probe), "PeerMemory: a copy");
    driver_.check(driver_.cuEventRecord(probe.event, probe.stream), "cuEventRecord");
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    CUresult result = kCudaErrorNotReady;
    while ((result = driver_.cuEventQuery(probe.event)) == kCudaErrorNotReady) {
      if (std::chrono::duration<double>(Clock::now() - began).count() > timeout_s) {
        is_busy_ = true;
        raise("RuntimeError", "PeerMemory: GPU " + std::to_string(ordinal) +
                                  " has not done a copy within the deadline: it hangs, or other "
                                  "work keeps it");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    driver_.check(result, "PeerMemory: a copy");
    if (to != nullptr) std::memcpy(to, probe.pinned, static_cast<size_t>(bytes));
  }

  const Driver& driver_ = Driver::get();
  const Vmm& vmm_ = Vmm::get();
  std::vector<int> ordinals_;
  std::vector<VmmAccess> access_;
  bool is_busy_ = false;  // the GPU may still write it, at an unknown time: it is kept
};

}  // namespace

std::shared_ptr<PeerRange> make_gpu_range(i64 size, i64 share_bytes, std::vector<int> ordinals) {
  return std::make_shared<GpuRange>(size, share_bytes, std::move(ordinals));
}

}  // namespace jitkern
