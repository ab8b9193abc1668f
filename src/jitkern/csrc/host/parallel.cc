#include <jitkern/parallel.h>
#include <tvm/ffi/function.h>

#include <atomic>

namespace jitkern {

namespace {

std::atomic<int> limit{1};

void set_num_threads(int64_t count) { limit.store(static_cast<int>(std::max<int64_t>(count, 1))); }

}  // namespace

int num_threads() { return limit.load(std::memory_order_relaxed); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_num_threads, set_num_threads);

}  // namespace jitkern
