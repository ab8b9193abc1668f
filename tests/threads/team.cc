// What the copies on the CPU use of torch and its OpenMP, made of threads that ThreadSanitizer
// sees: it knows nothing of the barriers of a runtime that it was not compiled with.
#include <thread>
#include <vector>

namespace at {
__attribute__((visibility("default"))) int get_num_threads() { return 3; }
}  // namespace at

extern "C" __attribute__((visibility("default"))) void GOMP_parallel(void (*run)(void*), void* data,
                                                                     unsigned count, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < count; ++i) others.emplace_back(run, data);
  run(data);
  for (std::thread& other : others) other.join();
}
