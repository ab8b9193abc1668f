// h2d_gather with pairs on the host, on a GPU that is late: what other threads may do meanwhile,
// and a driver that fails. What one thread sees is tested on GPUs by ../ops/test_pairs_on_host.py.
// `uploads` runs every case, `uploads NAME` one. A case that takes longer than UPLOADS_LIMIT_S
// hangs.
#include <sched.h>
#include <signal.h>

#include <memory>
#include <thread>

#include "tables.h"

namespace calls {

namespace {

constexpr i64 kMegabyte = i64(1) << 20;

void call(const Shape& shape, CUstream stream) {
  Tables tables(shape, stream);
  tables.run();
  tables.check(std::to_string(shape.num_pairs) + " rows of " + std::to_string(shape.row_bytes));
}

// Many lists of pairs in the pinned memory that they are sent from.
void uploads() {
  const CUstream stream = fake::make_stream(0);
  const CUstream other = fake::make_stream(0);
  std::vector<std::unique_ptr<Tables>> all;
  for (int i = 0; i < 6; ++i) {
    const Shape shape{1, 500'000 - i};
    all.push_back(std::make_unique<Tables>(shape, i == 0 ? stream : other));
  }
  fake::run_on(stream, [] { usleep(300'000); });
  for (const auto& tables : all) tables->run();
  for (const auto& tables : all) tables->check("one of many");
}

// Another thread writes pairs of the second block after all were checked.
void rewritten_late() {
  const CUstream stream = fake::make_stream(0);
  for (const int index_bytes : {4, 8}) {
    if (kIsSlow && index_bytes == 4) continue;
    const i64 first = 1'060'000;  // a block has 1,048,576 pairs
    Tables tables({3, 1'200'000, index_bytes}, stream);
    const i64 far = index_bytes == 4 ? INT32_MAX : INT64_MAX;
    fake::before_next(fake::kCopy, [&] {
      for (i64 i = first; i < tables.shape.num_pairs; i += 100) {
        tables.spoil_pair(i, tables.num_src_rows + i % 3, 0);
        tables.spoil_pair(i + 1, 0, tables.num_dst_rows);
        tables.spoil_pair(i + 2, far, far);
        tables.spoil_pair(i + 3, -5, far);
      }
    });
    tables.run();
    tables.check("rewritten");
  }
}

// Calls of several threads at once, on one device and on several.
void at_once() {
  fake::delay_at_random(100);
  for (const bool one_device : {true, false}) {
    std::vector<std::thread> threads;
    for (int number = 0; number < 3; ++number) {
      threads.emplace_back([=] {
        const int device = one_device ? 0 : number;
        const CUstream stream = fake::make_stream(device);
        for (int round = 0; round < (kIsSlow ? 5 : 10); ++round) {
          call({6560, 100 + 300 * (round % 3), 8, device}, stream);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// A call in which the driver fails says so; the work it had queued is over before its memory goes,
// and does no harm to the next call.
void failing() {
  fake::delay_at_random(500);
  const CUstream stream = fake::make_stream(0);
  for (const fake::Kind kind : {fake::kCopy, fake::kLaunch, fake::kRecord, fake::kAllocation}) {
    const std::string what = "failing call of kind " + std::to_string(kind) + " number ";
    for (i64 number = 1;; ++number) {
      auto failed = std::make_unique<Tables>(Shape{70000, 4 * kMegabyte / 70000}, stream);
      const i64 calls = fake::num_calls(kind);
      fake::fail(kind, number);
      const std::string error = failed->try_run();
      fake::fail(kind, 0);
      const bool any = fake::num_calls(kind) - calls >= number;
      require(any == (error.rfind("RuntimeError", 0) == 0), what + std::to_string(number) + error);
      failed.reset();
      call({6560, 300}, stream);  // the next
      if (any) continue;
      require(number > 1, what + ": there are some");
      break;
    }
  }
}

// A fault that several threads see at once is raised by one of them.
void one_fault() {
  jitkern::Device& device = jitkern::Device::get(0);
  constexpr int kNumThreads = 8;
  const i64 num_rounds = kIsSlow ? 200 : 2000;
  std::atomic<i64> come{0}, raised{0}, wrong{0};
  // Waits for all; the last one to come does `first`.
  const auto meet = [&](i64 meeting, const std::function<void()>& first) {
    if (come.fetch_add(1) == (meeting + 1) * (kNumThreads + 1) - 2) {
      first();
      ++come;
    }
    while (come < (meeting + 1) * (kNumThreads + 1)) sched_yield();
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < kNumThreads; ++number) {
    threads.emplace_back([&] {
      for (i64 round = 0; round < num_rounds; ++round) {
        meet(2 * round, [&] {
          require(raised == round && device.fault->state == 0, "each fault is raised once");
          *device.fault = {2, jitkern::FaultSite{}, round, 900, 900};
        });
        try {
          jitkern::check_pending_fault(device);
        } catch (const tvm::ffi::Error& error) {
          ++raised;
          const std::string at = "index 900 at position " + std::to_string(round) + ",";
          if (error.message().find(at) == std::string::npos) ++wrong;
        }
        meet(2 * round + 1, [] {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  require(raised == num_rounds && wrong == 0, "each fault is raised once, as what it is");
}

struct Case {
  const char* name;
  void (*run)();
};
#define CASE(name) {#name, name}
const Case kCases[] = {CASE(uploads), CASE(rewritten_late), CASE(at_once), CASE(failing),
                       CASE(one_fault)};

}  // namespace

}  // namespace calls

int main(int count, char** names) {
  signal(SIGALRM, [](int) { _exit(write(2, "FAILED: hangs\n", 14) < 0 ? 2 : 1); });
  calls::set_up();
  const char* const limit = std::getenv("UPLOADS_LIMIT_S");  // of a case
  const unsigned limit_s = limit == nullptr ? 120 : static_cast<unsigned>(std::atoi(limit));
  bool any = false;
  for (const calls::Case& one : calls::kCases) {
    if (count > 1 && names[1] != std::string(one.name)) continue;
    any = true;
    calls::running_case = one.name;
    alarm(limit_s);
    one.run();
    fake::synchronize_all();
    calls::require(fake::num_faults() == 0, "the GPU was given rows out of range");
    fake::delay_at_random(0);
    std::printf("%s passed\n", one.name);
  }
  std::fflush(stdout);
  _exit(any ? 0 : 2);  // the threads of streams are never over
}
