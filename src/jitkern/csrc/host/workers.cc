#include "host/workers.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace jitkern {

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

// Threads that wait for the next call.
struct Crew {
  std::mutex mutex;
  std::condition_variable changed;
  i64 size = 0;
  i64 wanted = 0;   // that have not begun the call's work
  i64 running = 0;  // that have not finished it, or not begun
  const std::function<void()>* work = nullptr;

  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return wanted > 0; });
      --wanted;
      const std::function<void()>* now = work;
      lock.unlock();
      (*now)();
      lock.lock();
      if (--running == 0) changed.notify_all();
    }
  }

  // Starts up to `count`; returns how many there are.
  i64 hire(i64 count) {
    try {
      for (; size < count; ++size) std::thread([this] { loop(); }).detach();
    } catch (const std::system_error&) {
      // no more to be had: those that there are do the work
    }
    return std::min(size, count);
  }
};

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

i64 Parts::take() {
  const i64 number = taken_.fetch_add(1);
  const auto is_there = [this, number] { return published_.load() > number; };
  for (const i64 end = now_ns() + kSpinNs; !is_there() && now_ns() < end;) pause_core();
  if (!is_there()) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_there() || closed_; });
  }
  return is_there() ? number : -1;
}

i64 Parts::try_take() {
  i64 number = taken_.load();
  while (number < published_.load()) {
    if (taken_.compare_exchange_weak(number, number + 1)) return number;
  }
  return -1;
}

void Parts::publish(i64 count) {
  published_.store(count);
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Parts::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void run_with_workers(i64 count, const std::function<void()>& work,
                      const std::function<void()>& lead) {
  if (count < 1) return lead();
  Crews& all = crews();
  Crew& crew = *all.take();
  {
    const std::lock_guard<std::mutex> lock(crew.mutex);
    crew.work = &work;
    crew.wanted = crew.running = crew.hire(count);
    crew.changed.notify_all();
  }
  const auto finish = [&] {
    {
      std::unique_lock<std::mutex> lock(crew.mutex);
      crew.running -= crew.wanted;  // these have not woken up, and there is nothing left to do
      crew.wanted = 0;
      crew.changed.wait(lock, [&crew] { return crew.running == 0; });
    }
    all.give_back(&crew);
  };
  try {
    lead();
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

void Backoff::wait() {
  if (waited_ns_ == 0) started_ns_ = now_ns();
  waited_ns_ = std::max<i64>(1, now_ns() - started_ns_);
  if (waited_ns_ < kSpinNs) return pause_core();
  const timespec pause{0, std::min(waited_ns_ / 2, kLongestSleepNs)};
  nanosleep(&pause, nullptr);
}

}  // namespace jitkern
