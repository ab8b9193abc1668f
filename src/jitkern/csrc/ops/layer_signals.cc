// LayerSignals: flags that tell streams and the host which layers of a copy have arrived.
#include <tvm/ffi/function.h>

#include "block_buffers.h"

namespace jitkern {

LayerSignals::LayerSignals(tvm::ffi::Tensor flags, tvm::ffi::Tensor num_past)
    : flags_(std::move(flags)), num_past_(std::move(num_past)) {
  const DLDevice device = num_past_.device();
  ordinal_ = device.device_type == kDLCUDA ? device.device_id : -1;
  if (ordinal_ < 0) return;
  const LaunchScope scope(ordinal_);
  const i64 bytes = num_layers() * 4;
  const Rows rows(Tensor("LayerSignals", "flags", flags_), 1, bytes, bytes);
  on_gpu_ = reinterpret_cast<u32*>(mapped_rows(rows));
}

// The flags are kept if a queued copy may still write them.
LayerSignals::~LayerSignals() {
  if (ordinal_ < 0 || generation_ == 0 || are_all_done()) return;
  new tvm::ffi::Tensor(flags_);
  new tvm::ffi::Tensor(num_past_);
}

u32* LayerSignals::flags() const { return static_cast<u32*>(flags_.data_ptr()); }

bool LayerSignals::is_done(i64 layer) const {
  const u32 flag = __atomic_load_n(flags() + layer, __ATOMIC_ACQUIRE);
  return generation_ > 0 && static_cast<i32>(flag - generation_) >= 0;
}

bool LayerSignals::are_all_done() const {
  for (i64 i = 0; i < num_layers(); ++i) {
    if (!is_done(i)) return false;
  }
  return true;
}

LayerFlags LayerSignals::begin(const LaunchScope& scope) {
  if (is_capturing(scope.stream())) {
    raise_value_error("copy_blocks", "signals", "LayerSignals while a graph is captured", "None");
  }
  if (generation_ > 0 && scope.stream() != stream_ && !are_all_done()) {
    raise_value_error("copy_blocks", "signals", "of a copy on another stream that has not ended",
                      "one copy at a time");
  }
  stream_ = scope.stream();
  return {on_gpu_, static_cast<u32*>(num_past_.data_ptr()), ++generation_,
          static_cast<u32>(num_layers())};
}

void LayerSignals::set_all() {
  ++generation_;
  for (i64 i = 0; i < num_layers(); ++i) {
    __atomic_store_n(flags() + i, generation_, __ATOMIC_RELEASE);
  }
}

void LayerSignals::wait(i64 layer, CUstream stream) {
  if (generation_ == 0) {
    raise_error("RuntimeError", "LayerSignals.wait: no copy was queued with these signals");
  }
  if (ordinal_ < 0) return;
  const ContextScope scope(Device::get(ordinal_));
  if (is_capturing(stream)) {
    raise_error("RuntimeError", "LayerSignals.wait: a graph is captured; wait outside of it");
  }
  const Driver& driver = Driver::get();
  if (driver.cuStreamWaitValue32_v2 == nullptr) {
    raise_error("RuntimeError", "LayerSignals.wait: the driver is older than CUDA 11.7");
  }
  JITKERN_CU(cuStreamWaitValue32_v2, stream, address(on_gpu_ + layer), generation_, kWaitAtLeast);
}

// -- for Python ----------------------------------------------------------------------------------

namespace {

tvm::ffi::ObjectRef make_layer_signals(tvm::ffi::Tensor flags, tvm::ffi::Tensor num_past) {
  return tvm::ffi::ObjectRef(
      tvm::ffi::make_object<LayerSignals>(std::move(flags), std::move(num_past)));
}

void wait_layer_signal(AnyView signals, int64_t layer, int64_t stream) {
  LayerSignals::of(signals)->wait(layer, reinterpret_cast<CUstream>(stream));
}

bool is_layer_done(AnyView signals, int64_t layer) {
  return LayerSignals::of(signals)->is_done(layer);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_layer_signals, make_layer_signals);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wait_layer_signal, wait_layer_signal);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(is_layer_done, is_layer_done);

}  // namespace jitkern
