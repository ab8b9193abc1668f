#include <dlfcn.h>
#include <jitkern/parallel.h>
#include <pthread.h>

#include <cmath>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <vector>

namespace jitkern {

namespace {

// The OpenMP that torch is linked with, GNU's or LLVM's. Its threads spin for a while after each op
// of torch; threads of our own would cost a start each and wait for their cores. Between ops of
// torch on 16 cores, indexing of 8,192 rows of 656 bytes takes 48 us with it and took 661 without.
struct OpenMp {
  // How compiled code enters a parallel region: (function, its argument, threads, flags).
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*num_threads)();  // at::get_num_threads()

  // Null where torch is not loaded, or was built without OpenMP.
  static const OpenMp* get_or_null() {
    static const OpenMp found = find();
    return found.parallel != nullptr && found.num_threads != nullptr ? &found : nullptr;
  }

 private:
  static OpenMp find() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return {};
    return {reinterpret_cast<decltype(parallel)>(dlsym(torch, "GOMP_parallel")),
            reinterpret_cast<decltype(num_threads)>(dlsym(torch, "_ZN2at15get_num_threadsEv"))};
  }
};

// Whether this process was forked and has not called exec since: the kernel keeps a flag of it.
bool is_forked() {
  constexpr unsigned long kForkedNoExec = 0x40;  // PF_FORKNOEXEC
  unsigned long flags = kForkedNoExec;
  if (FILE* stat = std::fopen("/proc/self/stat", "r")) {
    // "pid (name) state parent group session terminal its-group flags ..."
    const int read = std::fscanf(stat, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %lu", &flags);
    if (read != 1) flags = kForkedNoExec;
    std::fclose(stat);
  }
  return (flags & kForkedNoExec) != 0;
}

// In a child that was forked from a process with a team of threads GNU's runtime hangs, whether the
// team was torch's before this module was loaded, or ours.
std::atomic<bool> forked{is_forked()};
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

// Whether `count` threads more can be had. GNU's runtime ends the process if one cannot, so they
// are started once for each calling thread, which gets a team of its own, before it is used.
bool can_start(i64 count) {
  thread_local i64 were_started = 0;
  if (count <= were_started) return true;
  std::vector<std::thread> threads;
  std::mutex until_all_are_there;
  bool all = true;
  {
    const std::lock_guard<std::mutex> hold(until_all_are_there);
    try {
      threads.reserve(static_cast<size_t>(count));
      while (static_cast<i64>(threads.size()) < count) {
        threads.emplace_back([&] { const std::lock_guard<std::mutex> wait(until_all_are_there); });
      }
    } catch (const std::system_error&) {
      all = false;
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (all) were_started = count;
  return all;
}

i64 max_threads() {
  const OpenMp* openmp = OpenMp::get_or_null();
  return openmp != nullptr ? openmp->num_threads() : std::thread::hardware_concurrency();
}

// One core reads and writes this much in about 20 us; to start a thread takes 5 to 15.
constexpr i64 kBytesPerThread = i64(256) << 10;

}  // namespace

i64 threads_for(i64 count, i64 bytes) {
  const i64 worth = std::min(count, bytes / kBytesPerThread);
  return worth <= 1 ? 1 : std::clamp(max_threads(), i64(1), worth);
}

void on_threads(i64 threads, const std::function<void()>& work) {
  const OpenMp* openmp = OpenMp::get_or_null();
  if (openmp != nullptr && !forked.load(std::memory_order_relaxed)) {
    // All of torch's team, also where fewer would do: GNU's runtime lets go of threads that a
    // smaller team leaves out, and torch's next op, which starts them anew, took 1.0 ms and not
    // 0.4.
    const i64 team = openmp->num_threads();
    if (can_start(team - 1)) {
      const auto call = [](void* data) { (*static_cast<const std::function<void()>*>(data))(); };
      openmp->parallel(call, const_cast<std::function<void()>*>(&work), static_cast<unsigned>(team),
                       0);
      return;
    }
  }
  // p starts and 1 / p of the copy take least where p is the root of what the copy is worth in
  // starts. Nobody waits for a thread that has not begun when the last part is taken: on a busy
  // machine that would be milliseconds.
  const i64 starts = static_cast<i64>(std::sqrt(static_cast<double>(threads)));
  try {
    for (i64 i = 0; i < starts; ++i) std::thread(work).detach();
  } catch (const std::system_error&) {
    // The process may not have more threads; those that there are do all parts.
  }
  work();
}

}  // namespace jitkern
