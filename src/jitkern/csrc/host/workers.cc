#include "host/workers.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace jitkern {

// Threads for one call at a time.
struct ThreadPool {
  std::mutex mutex;
  std::condition_variable woken;
  std::condition_variable all_idle;
  i64 size = 0;
  i64 at_work = 0;
  i64 count = 0;  // threads that take part in the call, the first ones
  u64 wakes = 0;
  const std::function<void()>* work = nullptr;

  void loop(i64 number) {
    u64 last_wake = 0;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      woken.wait(lock, [&] { return work != nullptr && number < count && last_wake != wakes; });
      last_wake = wakes;
      ++at_work;
      const std::function<void()>* now = work;
      lock.unlock();
      (*now)();
      lock.lock();
      --at_work;
      if (work == nullptr && at_work == 0) all_idle.notify_all();
    }
  }

  // Starts threads until there are `wanted`, or no more can be started.
  void grow(i64 wanted) {
    try {
      for (; size < wanted; ++size) std::thread([this, number = size] { loop(number); }).detach();
    } catch (const std::system_error&) {
    }
  }
};

namespace {

constexpr i64 kSpinNs = 20'000;
constexpr i64 kLongestSleepNs = 500'000;

// Gives way to the other hardware thread of the core.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

i64 now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Pools that no call uses. Never destroyed: threads sleep in them until the process ends.
auto& idle_mutex = *new std::mutex();
auto& idle_pools = *new std::vector<ThreadPool*>();

// A forked child has none of its parent's threads.
const int kForgetInChild = pthread_atfork(nullptr, nullptr, [] {
  new (&idle_mutex) std::mutex();
  new (&idle_pools) std::vector<ThreadPool*>();
});

ThreadPool* take_pool() {
  const std::lock_guard<std::mutex> lock(idle_mutex);
  if (idle_pools.empty()) return new ThreadPool();
  ThreadPool* const pool = idle_pools.back();
  idle_pools.pop_back();
  return pool;
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
  pool_ = take_pool();
  const std::lock_guard<std::mutex> lock(pool_->mutex);
  pool_->grow(count);
  pool_->count = count;
  pool_->work = &work_;
}

Workers::~Workers() {
  if (pool_ == nullptr) return;
  {
    std::unique_lock<std::mutex> lock(pool_->mutex);
    pool_->work = nullptr;
    pool_->all_idle.wait(lock, [this] { return pool_->at_work == 0; });
  }
  const std::lock_guard<std::mutex> lock(idle_mutex);
  idle_pools.push_back(pool_);
}

void Workers::wake() {
  if (pool_ == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(pool_->mutex);
    ++pool_->wakes;
    if (pool_->at_work == pool_->count) return;
  }
  pool_->woken.notify_all();
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
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns_ / 2, kLongestSleepNs)));
}

}  // namespace jitkern
