// PeerMemory: the memory of all ranks of a host in one address range of this process. It is made of
// memfds on the CPU, and by the driver's virtual memory management on GPUs, without multicast.
#include <jitkern/launch.h>
#include <sys/mman.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "host/objects.h"
#include "host/staging.h"

namespace jitkern {

namespace {

using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;

// Whether this GPU has memory that other processes can map.
bool gpu_shares_memory(int ordinal) {
  const CUdevice device = device_handle(ordinal);
  return device_attribute(device, kAttributeKnowsVmm) != 0 &&
         device_attribute(device, kAttributeExportsFds) != 0;
}

// -- ranges --------------------------------------------------------------------------------------

// Lives as long as the PeerMemory and its tensors. A forked child does not have the memory, and
// releases nothing.
class PeerRange {
 public:
  PeerRange(i64 size, i64 share_bytes) : size(size), share_bytes(share_bytes) {}
  PeerRange(const PeerRange&) = delete;
  PeerRange& operator=(const PeerRange&) = delete;

  const i64 size;         // ranks
  const i64 share_bytes;  // per rank, whole pages
  char* base = nullptr;

 protected:
  i64 bytes() const { return size * share_bytes; }
  bool is_forked() const { return getpid() != owner_; }

 private:
  const pid_t owner_ = getpid();
};

class HostRange : public PeerRange {
 public:
  HostRange(i64 size, i64 share_bytes) : PeerRange(size, share_bytes) {
    const size_t length = static_cast<size_t>(bytes());
    constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const begin = mmap(nullptr, length, PROT_NONE, kReserve, -1, 0);
    if (begin == MAP_FAILED) raise_errno();
    // A forked child would keep the memory of ranks that have ended.
    madvise(begin, length, MADV_DONTFORK);
    base = static_cast<char*>(begin);
  }
  ~HostRange() { release(); }

  int create(i64) { return -1; }  // Python makes the memfd
  // Maps the memory of `rank`. The caller closes the descriptor.
  void map(i64 rank, int fd) {
    const size_t length = static_cast<size_t>(share_bytes);
    char* const at = base + rank * share_bytes;
    if (mmap(at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
      raise_errno();
    }
    madvise(at, length, MADV_DONTFORK);
  }

  void write(i64 offset, Bytes from) { std::memcpy(base + offset, from.data(), from.size()); }
  Bytes read(i64 offset, size_t bytes) { return Bytes(base + offset, bytes); }
  void clear(i64 offset, size_t bytes) { std::memset(base + offset, 0, bytes); }
  void release() noexcept {
    if (base != nullptr && !is_forked()) munmap(base, static_cast<size_t>(bytes()));
    base = nullptr;
  }
  DLDevice device() const { return {kDLCPU, 0}; }

 private:
  [[noreturn]] static void raise_errno() {
    raise_error(errno == ENOMEM || errno == ENOSPC ? "MemoryError" : "RuntimeError",
                str("PeerMemory: mmap: ", std::strerror(errno)));
  }
};

class GpuRange : public PeerRange {
 public:
  GpuRange(i64 size, i64 share_bytes, int ordinal)
      : PeerRange(size, share_bytes),
        device_(Device::get(ordinal)),
        is_mapped_(static_cast<size_t>(size), false) {
    const ContextScope scope(device_);
    CUdeviceptr begin = 0;
    JITKERN_CU(cuMemAddressReserve, &begin, static_cast<size_t>(bytes()), 0, 0, 0);
    base = reinterpret_cast<char*>(begin);
  }
  ~GpuRange() { release(); }

  // Makes the memory of `rank` and maps it. Returns a descriptor, which the caller closes.
  int create(i64 rank) {
    const ContextScope scope(device_);
    const VmmProperties properties{
        kVmmPinned, kVmmAsFd, {kVmmOnDevice, device_.ordinal}, nullptr, {}};
    Handle handle;
    const CUresult result = Driver::get().cuMemCreate(&handle.value, length_, &properties, 0);
    if (result == kCudaErrorOutOfMemory) {
      raise_error("MemoryError",
                  str("PeerMemory: GPU ", device_.ordinal, " has no ", share_bytes,
                      " bytes left; torch.cuda.empty_cache() gives back what PyTorch keeps"));
    }
    Driver::get().check(result, "cuMemCreate");
    map_handle(rank, handle.value);
    int fd = -1;
    JITKERN_CU(cuMemExportToShareableHandle, &fd, handle.value, kVmmAsFd, 0);
    return fd;
  }

  void map(i64 rank, int fd) {
    const ContextScope scope(device_);
    Handle handle;
    void* const shared = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    JITKERN_CU(cuMemImportFromShareableHandle, &handle.value, shared, kVmmAsFd);
    map_handle(rank, handle.value);
  }

  void write(i64 offset, Bytes from) {
    run([&](CUstream stream) {
      copy_to_device(base + offset, from.data(), static_cast<i64>(from.size()), stream);
    });
  }
  Bytes read(i64 offset, size_t bytes) {
    std::vector<char> data(bytes);
    run([&](CUstream stream) {
      copy_to_host(data.data(), base + offset, static_cast<i64>(bytes), stream);
    });
    return Bytes(data.data(), bytes);
  }
  void clear(i64 offset, size_t bytes) {
    run([&](CUstream stream) { JITKERN_CU(cuMemsetD8Async, pointer(offset), 0, bytes, stream); });
  }

  // Waits for the GPU and releases the addresses. Memory stays in processes that have mapped it.
  void release() noexcept {
    if (base == nullptr) return;
    const CUdeviceptr begin = pointer(0);
    base = nullptr;
    if (is_forked()) return;
    try {
      const ContextScope scope(device_);
      // Python may drop a tensor while kernels that use it are queued.
      JITKERN_CU(cuCtxSynchronize);
      for (size_t rank = 0; rank < is_mapped_.size(); ++rank) {
        if (is_mapped_[rank]) JITKERN_CU(cuMemUnmap, begin + rank * length_, length_);
      }
      JITKERN_CU(cuMemAddressFree, begin, static_cast<size_t>(bytes()));
    } catch (const tvm::ffi::Error&) {
      // During a capture, or at the end of the process: the memory stays.
    }
  }
  // The GPU of this rank, also for the memory of others.
  DLDevice device() const { return {kDLCUDA, device_.ordinal}; }

 private:
  // Released after mapping: a mapping keeps the memory.
  struct Handle {
    CUmemHandle value = 0;
    ~Handle() {
      if (value != 0) Driver::get().cuMemRelease(value);
    }
  };

  CUdeviceptr pointer(i64 offset) const { return address(base + offset); }

  void map_handle(i64 rank, CUmemHandle handle) {
    const CUdeviceptr at = pointer(rank * share_bytes);
    JITKERN_CU(cuMemMap, at, length_, 0, handle, 0);
    is_mapped_[static_cast<size_t>(rank)] = true;
    const VmmAccess access{{kVmmOnDevice, device_.ordinal}, kVmmReadWrite};
    JITKERN_CU(cuMemSetAccess, at, length_, &access, 1);
  }

  // Queues a copy on the default stream and waits for it.
  template <class Queue>
  void run(const Queue& queue) {
    const RelaxedCapture relaxed;
    const ContextScope scope(device_);
    const CUevent event = make_event();
    queue(CUstream{nullptr});
    record(event, CUstream{nullptr});
    wait_for(event);
    destroy_event(event);
  }

  const Device& device_;
  const size_t length_ = static_cast<size_t>(share_bytes);
  std::vector<bool> is_mapped_;  // an entry for each rank
};

// -- for Python ----------------------------------------------------------------------------------

// The functions of a range, which keep it alive.
template <class Range>
Map<String, Function> functions_of(const std::shared_ptr<Range>& range) {
  const auto base = [range] { return reinterpret_cast<int64_t>(range->base); };
  const auto view = [range](int64_t offset, int64_t bytes) {
    return tensor_of(range, range->base + offset, bytes, range->device());
  };
  return {{"base", Function::FromTyped(base)},       {"view", Function::FromTyped(view)},
          {"create", method(range, &Range::create)}, {"map", method(range, &Range::map)},
          {"write", method(range, &Range::write)},   {"read", method(range, &Range::read)},
          {"clear", method(range, &Range::clear)},   {"release", method(range, &Range::release)}};
}

// `ordinal` is -1 for the CPU.
Map<String, Function> make_peer_range(i64 size, i64 share_bytes, int ordinal) {
  if (ordinal < 0) return functions_of(std::make_shared<HostRange>(size, share_bytes));
  return functions_of(std::make_shared<GpuRange>(size, share_bytes, ordinal));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gpu_shares_memory, gpu_shares_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_peer_range, make_peer_range);

}  // namespace jitkern
