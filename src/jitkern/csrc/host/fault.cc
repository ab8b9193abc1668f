// Faults: what becomes of an index that is out of range.
#include <jitkern/launch.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace jitkern {

namespace {

using tvm::ffi::Function;

// Takes the message of a fault; where Python has set none, a fault is raised.
Function& fault_handler() {
  static auto* function = new Function();  // never destroyed: Python may be gone by then
  return *function;
}

struct SiteName {
  const char* op;
  const char* arg;
  RaiseFault raise;
  const char* outcome;
};

// By the number of the site. Complete before the first call: ops ask for theirs as static objects.
std::vector<SiteName>& site_names() {
  static auto* names = new std::vector<SiteName>{
      {"jitkern", "unknown argument", raise_index_error, "the row was not copied"}};
  return *names;
}

}  // namespace

FaultSite fault_site(const char* op, const char* arg, RaiseFault raise, const char* outcome) {
  site_names().push_back({op, arg, raise, outcome});
  return static_cast<FaultSite>(site_names().size() - 1);
}

namespace {

// Of several threads that see a fault pending one takes it, and the others find it gone. One that
// came late would raise it again, or clear the next one unread. Not by another state of the record:
// of the host, kernels only know that it turns 2 into 0.
std::mutex turn;

// What is pending on the device, if `wanted` says so; then it is no more.
template <class Wanted>
std::optional<FaultRecord> take_fault(Device& device, const Wanted& wanted) {
  const std::lock_guard<std::mutex> lock(turn);
  if (!has_pending_fault(device)) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  const FaultRecord taken = *device.fault;
  if (!wanted(taken)) return std::nullopt;
  __atomic_store_n(&device.fault->state, 0, __ATOMIC_RELEASE);
  return taken;
}

}  // namespace

void raise_pending_fault(Device& device) {
  const auto taken = take_fault(device, [](const FaultRecord&) { return true; });
  if (!taken) return;
  const auto site = static_cast<u32>(taken->site);
  const SiteName name = site_names()[site < site_names().size() ? site : 0];
  const std::string note = " (found by an earlier call on cuda:" + std::to_string(device.ordinal) +
                           "; " + name.outcome + ")";
  try {
    name.raise(name.op, name.arg, taken->position, taken->value, taken->bound, note.c_str());
  } catch (const tvm::ffi::Error& error) {
    if (fault_handler() == nullptr) throw;
    fault_handler()(error.message());
  }
}

void forget_fault(Device& device, const FaultRecord& fault) {
  take_fault(device, [&](const FaultRecord& pending) {
    return pending.site == fault.site && pending.position == fault.position &&
           pending.value == fault.value && pending.bound == fault.bound;
  });
}

namespace {

void check_faults(int64_t ordinal) {
  if (Device* device = Device::find(static_cast<int>(ordinal))) check_pending_fault(*device);
}

int64_t max_devices() { return kMaxDevices; }

void set_fault_handler(Function function) { fault_handler() = std::move(function); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_faults, check_faults);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_devices, max_devices);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_fault_handler, set_fault_handler);

}  // namespace jitkern
