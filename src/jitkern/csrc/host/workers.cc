#include "host/workers.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace jitkern {

// Threads that one call after the other has.
struct Crew {
  std::mutex mutex;
  std::condition_variable called;
  std::condition_variable returned;
  i64 size = 0;
  i64 at_work = 0;
  i64 count = 0;  // that take part in the call: the first ones
  u64 calls = 0;  // to work
  const std::function<void()>* work = nullptr;

  void loop(i64 number) {
    u64 answered = 0;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      called.wait(lock, [&] { return work != nullptr && number < count && answered != calls; });
      answered = calls;
      ++at_work;
      const std::function<void()>* now = work;
      lock.unlock();
      (*now)();
      lock.lock();
      --at_work;
      if (work == nullptr && at_work == 0) returned.notify_all();
    }
  }

  // Starts up to `wanted`, if there are fewer.
  void hire(i64 wanted) {
    try {
      for (; size < wanted; ++size) std::thread([this, number = size] { loop(number); }).detach();
    } catch (const std::system_error&) {
      // no more to be had: those that there are do the work
    }
  }
};

namespace {

constexpr i64 kSpinNs = 20'000;
constexpr i64 kLongestSleepNs = 500'000;

// As if a moment had passed, which lets the other thread of a core go on.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

i64 now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return i64(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Those that no call has now. They belong to the process that started their threads.
struct Crews {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::vector<Crew*> idle;

  Crew* take() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return new Crew();
    Crew* const crew = idle.back();
    idle.pop_back();
    return crew;
  }
  void give_back(Crew* crew) {
    const std::lock_guard<std::mutex> lock(mutex);
    idle.push_back(crew);
  }
};

// Never destroyed: threads sleep in them until the process ends. A forked child has none of its
// parent's threads, so it begins with crews of its own.
Crews& crews() {
  static std::atomic<Crews*> current{new Crews()};
  Crews* found = current.load();
  if (found->owner != getpid()) {
    Crews* made = new Crews();
    if (!current.compare_exchange_strong(found, made)) {
      delete made;  // another thread of the child was first
    } else {
      found = made;
    }
  }
  return *found;
}

}  // namespace

i64 num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return std::max<i64>(1, std::thread::hardware_concurrency());  // more than a set has room for
}

Workers::Workers(i64 count, std::function<void()> work) : work_(std::move(work)) {
  if (count < 1) return;
  crew_ = crews().take();
  const std::lock_guard<std::mutex> lock(crew_->mutex);
  crew_->hire(count);
  crew_->count = count;
  crew_->work = &work_;
}

Workers::~Workers() {
  if (crew_ == nullptr) return;
  {
    std::unique_lock<std::mutex> lock(crew_->mutex);
    crew_->work = nullptr;
    crew_->returned.wait(lock, [this] { return crew_->at_work == 0; });
  }
  crews().give_back(crew_);
}

void Workers::wake() {
  if (crew_ == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    ++crew_->calls;
    if (crew_->at_work == crew_->count) return;
  }
  crew_->called.notify_all();
}

i64 Parts::take() {
  i64 number = try_take();
  for (const i64 end = now_ns() + kSpinNs; number < 0 && !closed_ && now_ns() < end;) {
    pause_core();
    number = try_take();
  }
  return number;
}

i64 Parts::try_take() {
  i64 number = taken_.load();
  while (number < published_.load() && !closed_) {
    if (taken_.compare_exchange_weak(number, number + 1)) return number;
  }
  return -1;
}

void Backoff::wait() {
  if (waited_ns_ == 0) started_ns_ = now_ns();
  waited_ns_ = std::max<i64>(1, now_ns() - started_ns_);
  if (waited_ns_ < kSpinNs) return pause_core();
  const timespec pause{0, std::min(waited_ns_ / 2, kLongestSleepNs)};
  nanosleep(&pause, nullptr);
}

}  // namespace jitkern
