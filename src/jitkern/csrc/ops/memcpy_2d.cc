// memcpy_2d_async: checks, then one strided copy by the copy engine, or by the CPU.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <limits>
#include <string>

#include "host/copy_2d.h"
#include "unpack_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "memcpy_2d_async";
constexpr const char* kKinds[] = {"h2d", "d2h", "d2d", "h2h"};  // in the order of CopyKind

// The result of a call for Python.
enum Outcome : int64_t { kDone, kTorchHasToSeeIt, kStorageIsNeeded };

CopyKind kind_arg(AnyView value, const Tensor& dst, const Tensor& src) {
  const int expected = src.on_cuda() ? (dst.on_cuda() ? 2 : 1) : (dst.on_cuda() ? 0 : 3);
  const int kind = choice_arg(kOp, "kind", value, {kKinds[0], kKinds[1], kKinds[2], kKinds[3]});
  if (kind != expected || is_none(value)) {
    raise_value_error(
        kOp, "kind",
        str("'", kKinds[kind], "' from ", src.device_name(), " to ", dst.device_name()),
        str("'", kKinds[expected], "'"));
  }
  return static_cast<CopyKind>(kind);
}

i64 size_arg(const char* arg, AnyView value) {
  const i64 size = int_arg(kOp, arg, value);
  if (size < 0) raise_value_error(kOp, arg, std::to_string(size), "at least 0");
  return size;
}

i64 pitch_arg(const char* arg, AnyView value, i64 width, i64 height) {
  const i64 pitch = size_arg(arg, value);
  if (height > 1 && pitch < width) {
    raise_value_error(kOp, arg, std::to_string(pitch),
                      str("at least ", width, ", the width of its ", height, " rows"));
  }
  return height > 1 ? pitch : width;
}

// The bytes from the start of the view to its end.
i64 extent_bytes(const Tensor& view) {
  if (view.dl->strides == nullptr || view.numel() == 0) return view.numel() * view.item_bytes();
  i64 items = 1;
  for (int d = 0; d < view.dl->ndim; ++d) {
    const i64 stride = view.dl->strides[d];
    if (stride > 0) items += (view.dl->shape[d] - 1) * stride;
  }
  return items * view.item_bytes();
}

// Whether all rows lie in the view or in its storage; ValueError if not. `storages`: None, or
// address and bytes of each side's storage. False if they are needed to tell.
bool is_within(const Tensor& view, i64 pitch, i64 width, i64 height, AnyView storages, int side) {
  i64 reach = 0;  // from the start of the first row to the end of the last
  if (__builtin_mul_overflow(pitch, height - 1, &reach) ||
      __builtin_add_overflow(reach, width, &reach)) {
    reach = std::numeric_limits<i64>::max();
  }
  if (reach <= extent_bytes(view)) return true;
  i64 bytes = 0;  // an empty view has no address
  if (view.numel() > 0) {
    if (is_none(storages)) return false;
    const auto known = storages.cast<tvm::ffi::Array<int64_t>>();
    bytes = static_cast<i64>(known[2 * side] + known[2 * side + 1]) -
            static_cast<i64>(address(view.data()));
  }
  if (reach <= bytes) return true;
  view.value_error(
      str(height, " rows of ", width, " bytes, ", pitch, " bytes apart, which end ", reach,
          " bytes behind its first"),
      str("at most ", std::max(bytes, extent_bytes(view)), ", where its storage ends"));
}

// The device to copy on: the one of `stream`, number `ordinal`, or else the device of `on_gpu`.
Device& device_of(const Tensor& on_gpu, const Tensor& other, AnyView stream, AnyView ordinal) {
  Device& device = Device::get(on_gpu.ordinal());
  if (is_none(stream)) return device;
  const i64 chosen = ordinal.cast<int64_t>();
  if (chosen == on_gpu.ordinal()) return device;
  if (chosen == other.ordinal()) return Device::get(other.ordinal());
  raise_value_error(kOp, "stream", str("a stream of cuda:", chosen),
                    str("one of ", on_gpu.device_name(), ", as ", on_gpu.arg));
}

int64_t memcpy_2d(AnyView dst_arg, AnyView src_arg, AnyView dpitch_arg, AnyView spitch_arg,
                  AnyView width_arg, AnyView height_arg, AnyView kind_value, AnyView stream,
                  AnyView ordinal, AnyView storages) {
  const Tensor dst(kOp, "dst", dst_arg);
  const Tensor src(kOp, "src", src_arg);
  const i64 width = size_arg("width", width_arg);
  const i64 height = size_arg("height", height_arg);
  const i64 dpitch = pitch_arg("dpitch", dpitch_arg, width, height);
  const i64 spitch = pitch_arg("spitch", spitch_arg, width, height);
  const CopyKind kind = kind_arg(kind_value, dst, src);
  if (kind == CopyKind::kH2H && !is_none(stream)) {
    raise_value_error(kOp, "stream", str("a stream of cuda:", ordinal.cast<int64_t>()),
                      "None for a copy on the CPU, which is done at once");
  }
  if (torch_has_to_see_it()) return kTorchHasToSeeIt;
  const Tensor& on_gpu = dst.on_cuda() ? dst : src;
  Device* const device = kind == CopyKind::kH2H
                             ? nullptr
                             : &device_of(on_gpu, dst.on_cuda() ? src : dst, stream, ordinal);
  if (width == 0 || height == 0) return kDone;

  const bool lazy = may_be_lazy(dst_arg) || may_be_lazy(src_arg);
  if (is_none(storages) && lazy) return kStorageIsNeeded;  // Python looks at both tensors
  if (!is_within(dst, dpitch, width, height, storages, 0) ||
      !is_within(src, spitch, width, height, storages, 1)) {
    return kStorageIsNeeded;
  }
  const Rows to(dst, height, width, dpitch);
  const Rows from(src, height, width, spitch);
  if (dst.ordinal() == src.ordinal()) to.apart_from(from);
  if (kind == CopyKind::kH2H) {
    unpack_by_cpu(to.data, from.data, {simplified({0, 0, width, height, spitch, dpitch})});
    return kDone;
  }
  check_pending_fault(*device);
  const LaunchScope scope(*device, is_none(stream)
                                       ? current_stream(device->ordinal)
                                       : reinterpret_cast<CUstream>(stream.cast<int64_t>()));
  const bool one_registration =
      kind == CopyKind::kD2D || is_one_registration(kind == CopyKind::kH2D ? from : to, kPinCure);
  queue_copy(scope, kind, {to.data, from.data, dpitch, spitch, width, height}, one_registration);
  return kDone;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(memcpy_2d, memcpy_2d);

}  // namespace

}  // namespace jitkern
