#include "host/tuning.h"

#include <jitkern/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

namespace jitkern {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;

struct Default {
  const char* name;
  i64 value;
};

// Measured on one H200 and 16 cores of a Xeon.
constexpr Default kDefaults[kNumFigures] = {
    // The span of host memory whose random rows still hit the link's address translation cache.
    // Rows of 656 bytes from 0.75 / 1 / 1.5 / 2 / 4 / 16 GiB: 48 / 44 / 34 / 29 / 23 / 19 GB/s; in
    // order 48 up to 8 GiB, 43 at 16.
    {"reach_bytes", i64(768) << 20},
    // A call of up to this many bytes uses the bus for 40 us, and all of the GPU.
    {"small_call_bytes", i64(2) << 20},
    // SMs copy blocks whose piece of one layer has up to this many bytes, the engine larger ones:
    // pieces of 16 / 64 / 256 KB reach 5 / 55 / 55 GB/s by the engine, 51 by SMs.
    {"sm_piece_bytes", (i64(64) << 10) - 1},
    {"sm_piece_bytes_to_host", (i64(64) << 10) - 1},
    // MB/s that SMs write to the host beside compute; they could write 52,000. A decode step takes
    // 1.03 to 1.05 times as long, with 2 unpaced SMs 1.05 to 1.28. At 35,000 some steps took 2 to 3
    // times as long, as the host delays all traffic.
    {"paced_to_host_mb_s", 32'000},
};

// 0 until Python has been asked.
std::array<std::array<std::atomic<i64>, kNumFigures>, kMaxDevices> of_devices;

auto& tuner = *new Function();  // never destroyed: Python may be gone by then

// Asks Python for the figures of this machine. No lock is held, so two threads may both ask.
void ask_for_figures(int ordinal) {
  Map<String, int64_t> measured;
  if (tuner != nullptr) {
    measured = tuner(gpu_name(ordinal), driver_version()).cast<Map<String, int64_t>>();
  }
  for (int i = 0; i < kNumFigures; ++i) {
    of_devices[ordinal][i] = measured.Get(kDefaults[i].name).value_or(kDefaults[i].value);
  }
}

void set_tuner(Function function) { tuner = std::move(function); }

// The figures of a device by name.
Map<String, int64_t> figures(int64_t ordinal) {
  Map<String, int64_t> all;
  for (int i = 0; i < kNumFigures; ++i) {
    all.Set(kDefaults[i].name, figure(static_cast<int>(ordinal), static_cast<Figure>(i)));
  }
  return all;
}

// Sets a figure in this process. ValueError if there is no such device or figure.
void set_figure(int64_t ordinal, String name, int64_t value) {
  if (ordinal < 0 || ordinal >= kMaxDevices || value < 1) {
    raise_error("ValueError", str("jitkern: figure ", std::string(name), ": ", value, " on device ",
                                  ordinal, ", expected at least 1, on a device from 0 on"));
  }
  figure(static_cast<int>(ordinal), kReachBytes);  // asks Python now, not after this is set
  for (int i = 0; i < kNumFigures; ++i) {
    if (name == kDefaults[i].name) {
      of_devices[ordinal][i] = value;
      return;
    }
  }
  raise_error("ValueError", "jitkern: no figure " + std::string(name));
}

}  // namespace

i64 figure(int ordinal, Figure which) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return kDefaults[which].value;
  const std::atomic<i64>& value = of_devices[ordinal][which];
  if (value.load(std::memory_order_relaxed) == 0) ask_for_figures(ordinal);
  return value.load(std::memory_order_relaxed);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_tuner, set_tuner);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(figures, figures);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_figure, set_figure);

}  // namespace jitkern
