// Under ThreadSanitizer: every op on the CPU, from two threads at once, while a third one rewrites
// the indices that both read; then a fault that several threads see at once, and one raises.
#include <jitkern/launch.h>
#include <pthread.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using tvm::ffi::Function;

#define OP(name)                                                                 \
  extern "C" int __tvm_ffi_##name(void*, const TVMFFIAny*, int32_t, TVMFFIAny*); \
  static Function name() { return Function::FromExternC(nullptr, __tvm_ffi_##name, nullptr); }
OP(store_cache)
OP(indexing)
OP(h2d_gather)
OP(d2h_scatter)
OP(copy_blocks)
OP(unpack)
OP(merge_state)
OP(memcpy_2d)
#undef OP

namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kRowBytes = 8192;
constexpr int64_t kFar = int64_t(1) << 40;
constexpr int kRounds = 40;

// A tensor of bytes, of floats or of int64.
struct Memory {
  std::vector<char> bytes;
  std::vector<int64_t> shape;
  DLTensor dl;

  Memory(std::vector<int64_t> sizes, uint8_t code, uint8_t bits) : shape(std::move(sizes)) {
    size_t items = 1;
    for (const int64_t size : shape) items *= static_cast<size_t>(size);
    bytes.resize(items * bits / 8);
    dl = {bytes.data(),
          {kDLCPU, 0},
          static_cast<int>(shape.size()),
          {code, bits, 1},
          shape.data(),
          nullptr,
          0};
  }
};
Memory rows() { return Memory({kRows, kRowBytes}, kDLUInt, 8); }
Memory floats(std::vector<int64_t> shape) { return Memory(std::move(shape), kDLFloat, 32); }
Memory indices(std::vector<int64_t> shape) { return Memory(std::move(shape), kDLInt, 64); }

std::atomic<int64_t> passed{0}, refused{0};

template <class... Args>
void call(const Function& op, Args... args) {
  try {
    op(args...);
    ++passed;
  } catch (const tvm::ffi::Error& error) {
    if (error.kind() != "IndexError") {
      std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.message().c_str());
      std::abort();
    }
    ++refused;
  }
}

// Rows 0, 1, 2, ..., each `times` times, and every other round what is out of range.
void rewrite(Memory& memory, int64_t times, int64_t round) {
  auto* items = reinterpret_cast<int64_t*>(memory.bytes.data());
  for (int64_t i = 0; i < times * kRows; ++i) {
    const int64_t now = round % 2 == 0 ? i / times : i % 3 == 0 ? kRows : kFar;
    __atomic_store_n(items + i, now, __ATOMIC_RELAXED);
  }
}

// Row after row, in two pieces each, and every other round what is out of range.
void rewrite_descriptors(Memory& memory, int64_t round) {
  auto* items = reinterpret_cast<int64_t*>(memory.bytes.data());
  for (int64_t i = 0; i < kRows; ++i) {
    const int64_t at = round % 2 == 0 || i % 3 != 0 ? i * kRowBytes : kFar;
    const int64_t row[] = {at, i * kRowBytes + 5, 1000, 2, 3000, 4000};
    for (int k = 0; k < 6; ++k) __atomic_store_n(items + 6 * i + k, row[k], __ATOMIC_RELAXED);
  }
}

// One thread's calls, on tables of its own and the indices of all.
void calls(Memory& slots, Memory& pairs, Memory& descriptors) {
  Memory a = rows(), b = rows(), c = rows(), d = rows();
  Memory slot_map = indices({kRows});
  const tvm::ffi::Array<int64_t> range{3, kRows};
  const tvm::ffi::String kind("h2h");
  Memory out = floats({kRows, 8, 128}), lse = floats({kRows, 8});
  Memory merged = floats({kRows, 8, 128}), merged_lse = floats({kRows, 8});
  for (int64_t i = 0; i < kRows; ++i) reinterpret_cast<int64_t*>(slot_map.bytes.data())[i] = -1;
  for (int round = 0; round < kRounds; ++round) {
    call(store_cache(), &a.dl, &b.dl, &slots.dl, &c.dl, &d.dl, nullptr);
    call(indexing(), &a.dl, &slots.dl, &b.dl, nullptr, nullptr);
    call(indexing(), &a.dl, &slots.dl, &b.dl, range, nullptr);
    call(h2d_gather(), &a.dl, &b.dl, &pairs.dl, &slot_map.dl, true, nullptr, nullptr, nullptr);
    call(d2h_scatter(), &b.dl, &c.dl, &pairs.dl, nullptr, nullptr, nullptr);
    call(copy_blocks(), &d.dl, &c.dl, &pairs.dl, 0, 0, nullptr, nullptr, nullptr, nullptr);
    call(unpack(), &b.dl, &a.dl, &descriptors.dl, nullptr);
    call(merge_state(), &out.dl, &lse.dl, &out.dl, &lse.dl, &merged.dl, &merged_lse.dl, nullptr);
    call(memcpy_2d(), &d.dl, &a.dl, kRowBytes, kRowBytes, kRowBytes - 3, kRows, kind, nullptr,
         nullptr, nullptr);
  }
}

// A fault that several threads see at once is raised by one of them.
bool one_fault() {
  constexpr int kNumThreads = 8;
  constexpr int64_t kNumFaults = 200;
  jitkern::FaultRecord record{};
  jitkern::Device device{};
  device.fault = &record;
  std::atomic<int64_t> raised{0}, wrong{0};
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, kNumThreads);
  std::vector<std::thread> threads;
  for (int number = 0; number < kNumThreads; ++number) {
    threads.emplace_back([&] {
      for (int64_t fault = 0; fault < kNumFaults; ++fault) {
        if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD) {
          if (raised != fault || record.state != 0) ++wrong;
          record = {2, jitkern::FaultSite{}, fault, 900, 900};
        }
        pthread_barrier_wait(&barrier);
        try {
          jitkern::check_pending_fault(device);
        } catch (const tvm::ffi::Error& error) {
          ++raised;
          const std::string at = "index 900 at position " + std::to_string(fault) + ",";
          if (error.message().find(at) == std::string::npos) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return raised == kNumFaults && wrong == 0;
}

}  // namespace

int main() {
  Memory slots = indices({kRows}), pairs = indices({kRows, 2}), descriptors = indices({kRows, 6});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int64_t round = 0; !done; ++round) {
      // Slots and destinations are distinct: rows of one call that meet would be a race.
      rewrite(slots, 1, round);
      rewrite(pairs, 2, round);
      rewrite_descriptors(descriptors, round);
      std::this_thread::sleep_for(std::chrono::microseconds(round % 2 == 0 ? 200 : 20));
    }
  });
  std::thread other([&] { calls(slots, pairs, descriptors); });
  calls(slots, pairs, descriptors);
  other.join();
  done = true;
  writer.join();
  std::printf("%lld calls passed, %lld were refused\n", static_cast<long long>(passed.load()),
              static_cast<long long>(refused.load()));
  return passed > 0 && refused > 0 && one_fault() ? 0 : 1;
}
