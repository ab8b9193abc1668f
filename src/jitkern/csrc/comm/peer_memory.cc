// The memory of a PeerMemory on the CPU, and what Python is given of it on either device.
#include "comm/peer_range.h"

#include <jitkern/check.h>
#include <sys/mman.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace jitkern {

PeerRange::PeerRange(i64 size, i64 share_bytes)
    : size(size),
      share_bytes(share_bytes),
      is_mapped_(static_cast<size_t>(size), false),
      owner_(getpid()) {}

bool PeerRange::is_here() const { return getpid() == owner_; }

namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;

constexpr i64 kHugePageBytes = i64(2) << 20;

[[noreturn]] void raise_errno(const char* what) {
  const bool memory = errno == ENOMEM || errno == ENOSPC;
  throw tvm::ffi::Error(memory ? "MemoryError" : "RuntimeError",
                        std::string("PeerMemory: ") + what + ": " + std::strerror(errno), "");
}

class HostRange : public PeerRange {
 public:
  HostRange(i64 size, i64 share_bytes) : PeerRange(size, share_bytes) {
    // Addresses first, which nothing backs; from a huge page on, as memory of a GPU would begin.
    reserved_bytes_ = static_cast<size_t>(bytes() + kHugePageBytes);
    reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ == MAP_FAILED) raise_errno("mmap");
    // A child would keep the memory of ranks that are gone, and must not write it.
    madvise(reserved_, reserved_bytes_, MADV_DONTFORK);
    char* const first = static_cast<char*>(reserved_);
    base = first + -address(first) % kHugePageBytes;
  }
  ~HostRange() override { release(); }

  int create(i64, int, bool) override {
    throw tvm::ffi::Error("RuntimeError", "PeerMemory: memory on the CPU is made by Python", "");
  }

  void map(i64 rank, int fd) override {
    const size_t length = static_cast<size_t>(share_bytes);
    if (mmap(place_of(rank), length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
      raise_errno("mmap");
    }
    madvise(place_of(rank), length, MADV_DONTFORK);
    is_mapped_[static_cast<size_t>(rank)] = true;
  }

  void write(i64 offset, const char* from, i64 bytes, int, double) override {
    std::memcpy(base + offset, from, static_cast<size_t>(bytes));
  }
  void read(i64 offset, char* to, i64 bytes, int, double) override {
    std::memcpy(to, base + offset, static_cast<size_t>(bytes));
  }
  void clear(i64 offset, i64 bytes, int, double) override {
    std::memset(base + offset, 0, static_cast<size_t>(bytes));
  }

  void release() noexcept override {
    if (reserved_ != nullptr && is_here()) munmap(reserved_, reserved_bytes_);
    reserved_ = nullptr;
  }

 private:
  void* reserved_ = nullptr;
  size_t reserved_bytes_ = 0;
};

// What keeps the range for a tensor.
struct View {
  std::shared_ptr<PeerRange> range;

  void AllocData(DLTensor* tensor, char* at) { tensor->data = at; }
  void FreeData(DLTensor*) { range.reset(); }
};

void check_inside(const PeerRange& range, i64 offset, i64 bytes) {
  if (offset < 0 || bytes < 0 || offset + bytes > range.size * range.share_bytes) {
    throw tvm::ffi::Error("ValueError", "PeerMemory: outside of it", "");
  }
}

// Of the GPUs that are to see it, or of the CPU where there are none. In the order of `Range` in
// comm/peer_setup.py.
Array<Function> make_peer_range(int64_t size, int64_t share_bytes, Array<int64_t> ordinals) {
  std::vector<int> gpus;
  for (const int64_t ordinal : ordinals) gpus.push_back(static_cast<int>(ordinal));
  const auto range = gpus.empty() ? make_host_range(size, share_bytes)
                                  : make_gpu_range(size, share_bytes, std::move(gpus));
  return {
      Function::FromTyped([range]() -> int64_t { return reinterpret_cast<int64_t>(range->base); }),
      Function::FromTyped([range](int64_t rank, int64_t ordinal, bool is_exported) -> int64_t {
        return range->create(rank, static_cast<int>(ordinal), is_exported);
      }),
      Function::FromTyped(
          [range](int64_t rank, int64_t fd) { range->map(rank, static_cast<int>(fd)); }),
      Function::FromTyped([range](int64_t offset, Bytes from, int64_t ordinal, double timeout_s) {
        const i64 bytes = static_cast<i64>(from.size());
        check_inside(*range, offset, bytes);
        range->write(offset, from.data(), bytes, static_cast<int>(ordinal), timeout_s);
      }),
      Function::FromTyped(
          [range](int64_t offset, int64_t bytes, int64_t ordinal, double timeout_s) -> Bytes {
            check_inside(*range, offset, bytes);
            std::string to(static_cast<size_t>(bytes), '\0');
            range->read(offset, to.data(), bytes, static_cast<int>(ordinal), timeout_s);
            return Bytes(std::move(to));
          }),
      Function::FromTyped(
          [range](int64_t offset, int64_t bytes, int64_t ordinal, double timeout_s) {
            check_inside(*range, offset, bytes);
            range->clear(offset, bytes, static_cast<int>(ordinal), timeout_s);
          }),
      // On the GPU that uses it, whichever the memory lies on.
      Function::FromTyped([range](int64_t offset, int64_t bytes, int64_t ordinal) {
        check_inside(*range, offset, bytes);
        const DLDevice device =
            ordinal < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, static_cast<int32_t>(ordinal)};
        return tvm::ffi::Tensor::FromNDAlloc(View{range}, {bytes}, DLDataType{kDLUInt, 8, 1},
                                             device, range->base + offset);
      }),
      Function::FromTyped([range] { range->release(); }),
  };
}

}  // namespace

std::shared_ptr<PeerRange> make_host_range(i64 size, i64 share_bytes) {
  return std::make_shared<HostRange>(size, share_bytes);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_peer_range, make_peer_range);

}  // namespace jitkern
