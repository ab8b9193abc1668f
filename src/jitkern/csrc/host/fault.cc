// Faults: what becomes of an index that is out of range.
#include <jitkern/launch.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <string>

namespace jitkern {

namespace {

using tvm::ffi::Function;

enum FaultMode : int { kRaise = 0, kWarn = 1, kIgnore = 2 };
std::atomic<int> fault_mode{kRaise};

Function& warner() {
  static auto* function = new Function();  // never destroyed: Python may be gone by then
  return *function;
}

struct SiteName {
  const char* op;
  const char* arg;
};

SiteName name_of(FaultSite site) {
  switch (site) {
    case FaultSite::kStoreIndices:
      return {"store_cache", "indices"};
    case FaultSite::kIndexingIndices:
      return {"indexing", "indices"};
    case FaultSite::kH2dGatherSrc:
      return {"h2d_gather", "pairs[..., 0]"};
    case FaultSite::kH2dGatherDst:
      return {"h2d_gather", "pairs[..., 1]"};
    case FaultSite::kH2dGatherSlotMap:
      return {"h2d_gather", "slot_map"};
    case FaultSite::kD2hScatterSrc:
      return {"d2h_scatter", "pairs[..., 0]"};
    case FaultSite::kD2hScatterDst:
      return {"d2h_scatter", "pairs[..., 1]"};
    case FaultSite::kNone:
      break;
  }
  return {"jitkern", "unknown argument"};
}

}  // namespace

void raise_pending_fault(Device& device) {
  volatile FaultRecord* record = device.fault;
  std::atomic_thread_fence(std::memory_order_acquire);
  const SiteName name = name_of(static_cast<FaultSite>(static_cast<u32>(record->site)));
  const i64 position = record->position;
  const i64 value = record->value;
  const i64 bound = record->bound;
  std::atomic_thread_fence(std::memory_order_release);
  record->state = 0;
  const int mode = fault_mode.load(std::memory_order_relaxed);
  if (mode == kIgnore) return;
  const std::string note = " (found by an earlier call on cuda:" + std::to_string(device.ordinal) +
                           "; the row was not copied)";
  try {
    raise_index_error(name.op, name.arg, position, value, bound, note.c_str());
  } catch (const tvm::ffi::Error& error) {
    if (mode == kRaise || warner() == nullptr) throw;
    warner()(error.message());
  }
}

namespace {

void check_faults(int64_t ordinal) {
  if (Device* device = Device::find(static_cast<int>(ordinal))) check_pending_fault(*device);
}

void set_fault_mode(int64_t mode) { fault_mode.store(static_cast<int>(mode)); }

void set_warner(Function function) { warner() = std::move(function); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_faults, check_faults);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_fault_mode, set_fault_mode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_warner, set_warner);

}  // namespace jitkern
