// Rows that go through the CPU, on a GPU that is late: all ways that they may take, and what the
// caller may do meanwhile. `staging` runs every case, `staging NAME...` these.
// A case that takes longer than STAGING_LIMIT_S hangs.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "calls.h"

namespace calls {

namespace {

constexpr i64 kMegabyte = i64(1) << 20;

struct Taken {
  bool is_gather;
  const char* method;
  bool is_pinned;
};
const Taken kWays[] = {{true, "sm", true},    {true, "cpu", true},   {true, "cpu", false},
                       {true, "both", true},  {true, "auto", true},  {true, "auto", false},
                       {false, "sm", true},   {false, "cpu", true},  {false, "cpu", false},
                       {false, "auto", true}, {false, "auto", false}};

std::string text(const Taken& way, const Shape& shape, int num_threads) {
  return std::string(way.is_gather ? "gather" : "scatter") + " " + way.method +
         (way.is_pinned ? ", pinned, " : ", pageable, ") + std::to_string(shape.num_pairs) +
         " rows of " + std::to_string(shape.row_bytes) + " bytes, int" +
         std::to_string(8 * shape.index_bytes) + ", slot map of " +
         std::to_string(shape.slot_bytes) + " bytes, " + std::to_string(num_threads) + " threads";
}

void call(const Taken& way, Shape shape, int num_threads, CUstream stream) {
  shape.is_gather = way.is_gather;
  shape.is_pinned = way.is_pinned;
  if (!way.is_gather) shape.slot_bytes = 0;
  Tables tables(shape, stream);
  tables.run(way.method, num_threads);
  tables.check(text(way, shape, num_threads));
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
          Shape shape;
          shape.row_bytes = row_bytes;
          shape.num_pairs = row_bytes == 70000 ? 30 : 1500;
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
      if (way.method == std::string("auto")) continue;
      if (kIsSlow && (way.method != std::string("cpu") || !way.is_pinned)) continue;
      Shape shape;
      shape.row_bytes = slow == fake::kPlaces ? 70000 : 6560;
      shape.num_pairs = 30 * kMegabyte / shape.row_bytes;
      fake::delay(slow, 3000);
      call(way, shape, 3, stream);
      fake::delay(slow, 0);
    }
  }
}

// Parts of SMs and of the CPU that take turns.
void turns() {
  const CUstream stream = fake::make_stream(0);
  fake::delay_at_random(300);
  fake::delay(fake::kPlaces, 2000);
  for (const int index_bytes : {4, 8}) {
    Shape shape;
    shape.row_bytes = 320;
    shape.num_pairs = 100'000;
    shape.index_bytes = index_bytes;
    shape.slot_bytes = index_bytes;
    const i64 by_sms = fake::num_launches(fake::kCallers);
    const i64 by_cpu = fake::num_launches(fake::kPlaces);
    call({true, "both", true}, shape, 3, stream);
    if (kIsSlow) continue;  // the GPU, most of all
    require(fake::num_launches(fake::kCallers) - by_sms >= 2, "SMs get several parts");
    require(fake::num_launches(fake::kPlaces) - by_cpu >= 4, "the CPU gets several chunks");
  }
}

// What is queued in front of a call comes before it.
void in_order() {
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kWays) {
    Shape shape;
    shape.is_gather = way.is_gather;
    shape.is_pinned = way.is_pinned;
    Tables tables(shape, stream);
    tables.fill_late();
    tables.run(way.method, 3);
    tables.check(text(way, shape, 3));
  }
}

// More pairs than are copied at a time.
void blocks() {
  fake::delay_at_random(100);
  const CUstream stream = fake::make_stream(0);
  for (const Taken& way : kWays) {
    if (way.method == std::string("auto") || (kIsSlow && !way.is_pinned)) continue;
    Shape shape;
    shape.row_bytes = 3;
    shape.num_pairs = kIsSlow ? 530'000 : 1'100'000;
    shape.index_bytes = way.is_pinned ? 4 : 8;
    call(way, shape, 3, stream);
  }
}

// Pairs may be overwritten once a call has returned, so may the source of what the CPU moves.
void overwritten() {
  const CUstream stream = fake::make_stream(0);
  for (const bool via_cpu : {true, false}) {
    for (const i64 row_bytes : {3, 656}) {
      Shape shape;
      shape.row_bytes = row_bytes;
      shape.num_pairs = 4000;
      shape.slot_bytes = 8;
      shape.is_pinned = true;
      Tables tables(shape, stream);
      const auto held = fake::hold(stream);
      tables.run(via_cpu ? "cpu" : "sm", 3);
      tables.scribble_pairs();
      if (via_cpu) tables.scribble_source();
      held->set();
      tables.check(via_cpu ? "by the CPU" : "by SMs");
    }
  }
  Shape shape;
  shape.is_gather = false;
  Tables tables(shape, stream);
  tables.run("cpu", 3);
  tables.check_now("a scatter that is over");
}

// Calls right behind each other, in which the first one's rows have not left their chunks.
void in_a_row() {
  const CUstream stream = fake::make_stream(0);
  fake::delay(fake::kCopies, 3000);
  for (const bool gather_again : {false, true}) {
    Shape shape;
    shape.num_pairs = 6000;
    Tables first(shape, stream);
    shape.is_gather = gather_again;
    shape.num_pairs = 9000;
    Tables second(shape, stream);
    first.run("cpu", 3);
    second.run("cpu", 3);
    second.check("the second");
    first.check("the first");
  }
}

// Many lists of pairs in the pinned memory that they are sent from.
void uploads() {
  const CUstream stream = fake::make_stream(0);
  const CUstream other = fake::make_stream(0);
  for (const bool with_cpu : {false, true}) {
    std::vector<std::unique_ptr<Tables>> all;
    for (int i = 0; i < 6; ++i) {
      Shape shape;
      // What the CPU takes of a small call has room in the chunks, so that it does not wait.
      const bool is_small = i == 0 && with_cpu;
      shape.row_bytes = is_small ? 656 : 1;
      shape.num_pairs = is_small ? 1500 : 500'000 - i;
      shape.is_pinned = true;
      all.push_back(std::make_unique<Tables>(shape, i == 0 || !with_cpu ? stream : other));
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
  Shape shape;
  shape.device = 5;
  shape.num_pairs = 5000;
  Tables tables(shape, stream);
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

}  // namespace

const std::vector<Case> kCallCases = {
    {"ways", ways},         {"chunks", chunks},           {"turns", turns},
    {"blocks", blocks},     {"overwritten", overwritten}, {"in_a_row", in_a_row},
    {"in_order", in_order}, {"uploads", uploads},         {"first_use", first_use},
};

}  // namespace calls

// More cores than this machine may have: threads are limited by them.
extern "C" __attribute__((no_sanitize("thread", "address"))) int sched_getaffinity(pid_t, size_t,
                                                                                   cpu_set_t* set) {
  CPU_ZERO(set);
  for (int i = 0; i < 4; ++i) CPU_SET(i, set);
  return 0;
}

static void on_alarm(int) {
  constexpr char kText[] = "FAILED: hangs\n";
  if (write(2, kText, sizeof(kText) - 1) < 0) _exit(2);
  _exit(1);
}

int main(int count, char** names) {
  signal(SIGALRM, on_alarm);
  calls::set_up();
  const char* const limit = std::getenv("STAGING_LIMIT_S");  // of a case
  const unsigned limit_s = limit == nullptr ? 120 : static_cast<unsigned>(std::atoi(limit));
  bool any = false;
  for (const auto* cases : {&calls::kCallCases, &calls::kTroubleCases}) {
    for (const calls::Case& one : *cases) {
      bool wanted = count == 1;
      for (int i = 1; i < count; ++i) wanted |= names[i] == std::string(one.name);
      if (!wanted) continue;
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
  }
  std::fflush(stdout);
  _exit(any ? 0 : 2);  // the threads of streams are never over
}
