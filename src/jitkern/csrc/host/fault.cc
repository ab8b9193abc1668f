// Faults: out-of-range indices that kernels have found.
#include <jitkern/launch.h>

#include <cstring>
#include <mutex>
#include <optional>

namespace jitkern {

namespace {

using tvm::ffi::Function;

// Python's handler of a fault's message; if null, the fault is raised. Never destroyed:
// Python may be gone by then.
auto& fault_handler = *new Function();

struct Site {
  const char* op;
  const char* arg;
  RaiseFault raise;
  const char* outcome;
};

// By number. Complete before the first call: each op has its sites in static objects.
std::vector<Site>& sites() {
  static auto* all = new std::vector<Site>{
      {"jitkern", "unknown argument", raise_index_error, "the row was not copied"}};
  return *all;
}

// Several threads may see a fault; one takes it. Without the lock a second one would raise it
// again, or clear the next one unread. Kernels rely on the host changing the state from 2 to 0
// only.
std::mutex take_mutex;

// Takes the device's pending fault, or only if it is `wanted`.
std::optional<FaultRecord> take_fault(Device& device, const FaultRecord* wanted = nullptr) {
  const std::lock_guard<std::mutex> lock(take_mutex);
  if (!has_pending_fault(device)) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  const FaultRecord taken = *device.fault;
  if (wanted != nullptr && std::memcmp(&taken, wanted, sizeof(taken)) != 0) return std::nullopt;
  __atomic_store_n(&device.fault->state, 0, __ATOMIC_RELEASE);
  return taken;
}

void check_faults(int ordinal) {
  if (Device* device = Device::find(ordinal)) check_pending_fault(*device);
}

void set_fault_handler(Function function) { fault_handler = std::move(function); }

}  // namespace

FaultSite fault_site(const char* op, const char* arg, RaiseFault raise, const char* outcome) {
  sites().push_back({op, arg, raise, outcome});
  return static_cast<FaultSite>(sites().size() - 1);
}

void raise_pending_fault(Device& device) {
  const auto taken = take_fault(device);
  if (!taken) return;
  const auto number = static_cast<u32>(taken->site);
  const Site site = sites()[number < sites().size() ? number : 0];
  const auto note =
      str(" (found by an earlier call on cuda:", device.ordinal, "; ", site.outcome, ")");
  try {
    site.raise(site.op, site.arg, taken->position, taken->value, taken->bound, note.c_str());
  } catch (const tvm::ffi::Error& error) {
    if (fault_handler != nullptr) return static_cast<void>(fault_handler(error.message()));
    // Python tells an earlier call's fault from this call's error by the class: see errors.py.
    const std::string kind = error.kind();
    const bool is_builtin = kind == "IndexError" || kind == "RuntimeError";
    raise_error((is_builtin ? "jitkern.Earlier" + kind : kind).c_str(), error.message());
  }
}

void forget_fault(Device& device, const FaultRecord& fault) { take_fault(device, &fault); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_faults, check_faults);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_fault_handler, set_fault_handler);

}  // namespace jitkern
