// Rows that go through the CPU, on a GPU that is late: all ways that they may take, what the caller
// and other threads may do meanwhile, and a driver that fails. `staging` runs every case, `staging
// NAME` one. A case that takes longer than STAGING_LIMIT_S hangs.
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <memory>
#include <thread>

#include "tables.h"

namespace calls {

namespace {

constexpr i64 kMegabyte = i64(1) << 20;

struct Taken {
  const char* method;
  bool is_pinned;
};
// One of each kind, and then the others.
const Taken kWays[] = {{"sm", true},  {"cpu", false}, {"both", true},
                       {"cpu", true}, {"auto", true}, {"auto", false}};
const std::vector<Taken> kFew(kWays, kWays + 3);

bool is_by(const Taken& way, const char* method) { return way.method == std::string(method); }

Shape shape_of(const Taken& way, i64 row_bytes, i64 num_pairs, int device = 0) {
  return {row_bytes, num_pairs, 8, 0, way.is_pinned, 0, device};
}

std::string text(const Taken& way, const Shape& shape) {
  return std::string(way.method) + (way.is_pinned ? ", pinned, " : ", pageable, ") +
         std::to_string(shape.num_pairs) + " rows of " + std::to_string(shape.row_bytes);
}

void call(const Taken& way, const Shape& shape, int num_threads, CUstream stream) {
  Tables tables(shape, stream);
  tables.run(way.method, num_threads);
  tables.check(text(way, shape));
}

// Small calls, in all combinations.
void ways() {
  fake::delay_at_random(50);
  const CUstream stream = fake::make_stream(0);
  int number = 0;
  for (const Taken& way : kWays) {
    for (const i64 row_bytes : {1, 3, 656, 657, 70000}) {
      for (const int index_bytes : {4, 8}) {
        for (const int num_threads : {1, 3}) {
          Shape shape = shape_of(way, row_bytes, row_bytes == 70000 ? 30 : 1500);
          shape.index_bytes = index_bytes;
          const int kind = number++ % 5;
          if (kIsSlow && kind % 2 != 0) continue;
          shape.slot_bytes = kind < 2 ? 0 : kind == 2 ? 4 : 8;
          shape.gap_bytes = kind % 2 * 5;
          call(way, shape, num_threads, stream);
        }
      }
    }
  }
}

// Calls of more bytes than there are chunks for, while the stream is busy or one of the module's
// own is slow.
void chunks() {
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kWays) {
    for (const fake::Role slow : {fake::kCallers, fake::kCopies, fake::kPlaces}) {
      if (is_by(way, "auto")) continue;
      if (kIsSlow && (is_by(way, "sm") || !way.is_pinned)) continue;
      const bool takes_turns = is_by(way, "both") && slow == fake::kPlaces;
      const i64 row_bytes = takes_turns ? 320 : slow == fake::kPlaces ? 70000 : 6560;
      const i64 by_sms = fake::num_launches(fake::kCallers);
      const i64 by_cpu = fake::num_launches(fake::kPlaces);
      fake::delay(slow, 3000);
      call(way, shape_of(way, row_bytes, 30 * kMegabyte / row_bytes), 3, stream);
      fake::delay(slow, 0);
      if (!takes_turns || kIsSlow) continue;
      require(fake::num_launches(fake::kCallers) - by_sms >= 2, "SMs get several parts");
      require(fake::num_launches(fake::kPlaces) - by_cpu >= 4, "the CPU gets several chunks");
    }
  }
}

// What is queued in front of a call comes before it.
void in_order() {
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kWays) {
    Tables tables(shape_of(way, 656, 1000), stream);
    tables.fill_late();
    tables.run(way.method, 3);
    tables.check(text(way, tables.shape));
  }
}

// Pairs may be overwritten once a call has returned, so may the source of what the CPU moves.
void overwritten() {
  const CUstream stream = fake::make_stream(0);
  for (const bool via_cpu : {true, false}) {
    for (const i64 row_bytes : {3, 656}) {
      Shape shape = shape_of({"", true}, row_bytes, 4000);
      shape.slot_bytes = 8;
      Tables tables(shape, stream);
      const auto held = fake::hold(stream);
      tables.run(via_cpu ? "cpu" : "sm", 3);
      tables.scribble_pairs();
      if (via_cpu) tables.scribble_source();
      held->set();
      tables.check(via_cpu ? "by the CPU" : "by SMs");
    }
  }
}

// Calls right behind each other, in which the first one's rows have not left their chunks.
void in_a_row() {
  const CUstream stream = fake::make_stream(0);
  fake::delay(fake::kCopies, 3000);
  Tables first(shape_of({"", false}, 656, 6000), stream);
  Tables second(shape_of({"", false}, 656, 9000), stream);
  first.run("cpu", 3);
  second.run("cpu", 3);
  second.check("the second");
  first.check("the first");
}

// Many lists of pairs in the pinned memory that they are sent from.
void uploads() {
  const CUstream stream = fake::make_stream(0);
  const CUstream other = fake::make_stream(0);
  for (const bool with_cpu : {false, true}) {
    std::vector<std::unique_ptr<Tables>> all;
    for (int i = 0; i < 6; ++i) {
      // What the CPU takes of a small call has room in the chunks, so that it does not wait.
      const bool is_small = i == 0 && with_cpu;
      all.push_back(std::make_unique<Tables>(
          shape_of({"", true}, is_small ? 656 : 1, is_small ? 1500 : 500'000 - i),
          i == 0 || !with_cpu ? stream : other));
    }
    fake::run_on(stream, [] { usleep(300'000); });
    // The others' stream is past them before the first one's is.
    all[0]->run(with_cpu ? "both" : "sm", 1);
    for (size_t i = 1; i < all.size(); ++i) all[i]->run("sm", 3);
    for (const auto& tables : all) tables->check("one of many");
  }
}

// Chunks are memory that somebody had before, of whom work is still queued.
void first_use() {
  const CUstream stream = fake::make_stream(5);
  Tables tables(shape_of({"", false}, 656, 5000, 5), stream);
  const auto held = fake::hold(stream);
  const i64 copies = fake::num_calls(fake::kCopy);
  std::thread later([held, copies] {
    while (fake::num_calls(fake::kCopy) == copies) usleep(1000);
    usleep(200'000);  // time enough for one that does not wait, on a busy machine too
    held->set();
  });
  tables.run("cpu", 3);
  tables.check("the first call of a device");
  later.join();
}

// Another thread writes pairs of the second block once all were checked.
void rewritten_late() {
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kFew) {
    for (const int index_bytes : {4, 8}) {
      if (kIsSlow && index_bytes == 4) continue;
      // In the second block of an upload: of 1,048,576 pairs for the SMs, of 524,288 otherwise.
      const bool is_sm = is_by(way, "sm");
      const i64 first = is_sm ? 1'060'000 : 530'000;
      Shape shape = shape_of(way, 3, is_sm ? 1'200'000 : 600'000);
      shape.index_bytes = index_bytes;
      Tables tables(shape, stream);
      const i64 far = index_bytes == 4 ? INT32_MAX : INT64_MAX;
      fake::before_next(is_sm ? fake::kCopy : fake::kRecord, [&] {
        for (i64 i = first; i < shape.num_pairs; i += 100) {
          tables.spoil_pair(i, tables.num_src_rows + i % 3, 0);
          tables.spoil_pair(i + 1, 0, tables.num_dst_rows);
          tables.spoil_pair(i + 2, far, far);
          tables.spoil_pair(i + 3, -5, far);
        }
      });
      tables.run(way.method, 3);
      tables.check(way.method);
    }
  }
}

// Calls of several threads at once, on one device and on two.
void at_once() {
  fake::delay_at_random(100);
  for (const bool two_devices : {false, true}) {
    std::vector<std::thread> threads;
    for (int number = 0; number < 3; ++number) {
      threads.emplace_back([=] {
        const int device = two_devices ? number : 0;
        const CUstream stream = fake::make_stream(device);
        for (int round = 0; round < (kIsSlow ? 5 : 10); ++round) {
          const Taken& way = kFew[static_cast<size_t>(round + number) % 3];
          call(way, shape_of(way, 6560, 100 + 300 * (round % 3), device), 1 + round % 3, stream);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// A call that waits for its stream holds up no other device's.
void apart() {
  const CUstream busy = fake::make_stream(0);
  const CUstream free = fake::make_stream(1);
  const auto held = fake::hold(busy);
  const i64 launches = fake::num_launches(fake::kPlaces);
  std::thread waiting([busy] {
    const Taken way{"cpu", false};
    call(way, shape_of(way, 65600, 30 * kMegabyte / 65600), 3, busy);
  });
  while (fake::num_launches(fake::kPlaces) < launches + 6) usleep(1000);  // all chunks are in use
  for (const Taken& way : kFew) call(way, shape_of(way, 656, 1000, 1), 3, free);
  require(!held->is_set(), "the other stream is still busy");
  held->set();
  waiting.join();
}

// IndexError says which row, and nothing was queued.
void out_of_range() {
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kFew) {
    for (const i64 num_pairs : {1, 5000, 1'100'000}) {
      if (kIsSlow && num_pairs > 5000) continue;
      Tables tables(shape_of(way, 3, num_pairs), stream);
      for (const i64 i : {num_pairs - 1, num_pairs / 2}) {
        for (const int member : {0, 1}) {
          const i64 rows = member == 0 ? tables.num_src_rows : tables.num_dst_rows;
          for (const i64 row : {rows, i64(INT64_MAX)}) {
            const i64 was[] = {tables.pair_item(2 * i), tables.pair_item(2 * i + 1)};
            tables.set_pair_item(2 * i + 1 - member, 0);
            tables.set_pair_item(2 * i + member, row);
            const i64 queued = fake::num_queued();
            const std::string error = tables.try_run(way.method, 3);
            const std::string wanted = std::string("IndexError: h2d_gather: pairs[..., ") +
                                       std::to_string(member) + "]: index " + std::to_string(row) +
                                       " at position " + std::to_string(i) + ", expected below " +
                                       std::to_string(rows) + "; nothing was written";
            require(error == wanted, error + "; not: " + wanted);
            require(fake::num_queued() == queued, "something was queued");
            tables.set_pair_item(2 * i, was[0]);
            tables.set_pair_item(2 * i + 1, was[1]);
          }
        }
      }
      tables.check_untouched(way.method);
      tables.run(way.method, 3);
      tables.check("the call after");
    }
  }
}

// A call in which the driver fails says so; what it had queued is over before its memory goes, and
// does no harm to the next call.
void failing_calls(const Taken& way, fake::Kind kind, i64 row_bytes, i64 num_pairs) {
  const CUstream stream = fake::make_stream(0);
  const std::string what =
      std::string(way.method) + ", failing call of kind " + std::to_string(kind) + " number ";
  for (i64 number = 1;; ++number) {
    auto failed = std::make_unique<Tables>(shape_of(way, row_bytes, num_pairs), stream);
    const i64 calls = fake::num_calls(kind);
    fake::fail(kind, number);
    const std::string error = failed->try_run(way.method, 3);
    fake::fail(kind, 0);
    const bool any = fake::num_calls(kind) - calls >= number;
    require(any == (error.rfind("RuntimeError", 0) == 0), what + std::to_string(number) + error);
    failed.reset();
    call({"cpu", false}, shape_of({"", false}, 6560, 300), 3, stream);  // the next
    if (!any) return require(number > 1 || kind == fake::kAllocation, what + ": there are some");
    // Of queries there are as many as it takes.
    if (number == 5 && (kIsSlow || kind == fake::kQuery)) return;
  }
}

void failing() {
  fake::delay_at_random(500);
  for (const Taken& way : kFew) {
    for (const fake::Kind kind : {fake::kCopy, fake::kLaunch, fake::kRecord, fake::kWait}) {
      if (is_by(way, "sm") && kind == fake::kWait) continue;
      if (kIsSlow && (kind != fake::kRecord || !is_by(way, "cpu"))) continue;
      failing_calls(way, kind, 70000, 4 * kMegabyte / 70000);
    }
    if (!is_by(way, "sm")) failing_calls(way, fake::kQuery, 70000, 60);
  }
}

// The GPU's memory ends in the second block.
void no_memory() {
  fake::delay_at_random(1000);
  fake::delay(fake::kPlaces, 20000);
  failing_calls({"both", true}, fake::kAllocation, 16, 600'000);
}

i64 clock_ms(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// Threads that wait for a busy stream sleep.
void asleep() {
  if (kIsSlow) return;  // ThreadSanitizer takes time of its own
  constexpr i64 kBusyMs = 300;
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kFew) {
    if (is_by(way, "sm")) continue;
    Tables tables(shape_of(way, 656, 40 * kMegabyte / 656), stream);
    i64 cpu_ms[2];
    for (const bool busy : {false, true}) {
      tables.run(way.method, 3);  // memory is touched, chunks are there
      fake::synchronize_all();
      const i64 began_ms = clock_ms(CLOCK_MONOTONIC);
      const i64 cpu_began_ms = clock_ms(CLOCK_PROCESS_CPUTIME_ID);
      if (busy) fake::run_on(stream, [] { usleep(1000 * kBusyMs); });
      tables.run(way.method, 3);
      cpu_ms[busy] = clock_ms(CLOCK_PROCESS_CPUTIME_ID) - cpu_began_ms;
      const i64 took_ms = clock_ms(CLOCK_MONOTONIC) - began_ms;
      require(!busy || took_ms >= kBusyMs, "the call waits for the stream");
    }
    require(cpu_ms[1] < cpu_ms[0] + kBusyMs / 5,
            std::string(way.method) + ": " + std::to_string(cpu_ms[1]) + " ms of CPU time, " +
                std::to_string(cpu_ms[0]) + " where the stream is free");
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
const Case kCases[] = {CASE(ways),           CASE(chunks),  CASE(overwritten), CASE(in_a_row),
                       CASE(in_order),       CASE(uploads), CASE(first_use),   CASE(at_once),
                       CASE(rewritten_late), CASE(apart),   CASE(failing),     CASE(out_of_range),
                       CASE(no_memory),      CASE(asleep),  CASE(one_fault)};

}  // namespace

}  // namespace calls

// More cores than this machine may have: threads are limited by them.
extern "C" __attribute__((no_sanitize("thread", "address"))) int sched_getaffinity(pid_t, size_t,
                                                                                   cpu_set_t* set) {
  CPU_ZERO(set);
  for (int i = 0; i < 4; ++i) CPU_SET(i, set);
  return 0;
}

int main(int count, char** names) {
  signal(SIGALRM, [](int) { _exit(write(2, "FAILED: hangs\n", 14) < 0 ? 2 : 1); });
  calls::set_up();
  const char* const limit = std::getenv("STAGING_LIMIT_S");  // of a case
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
    for (int role = 0; role < fake::kNumRoles; ++role) fake::delay(fake::Role(role), 0);
    std::printf("%s passed\n", one.name);
  }
  std::fflush(stdout);
  _exit(any ? 0 : 2);  // the threads of streams are never over
}
