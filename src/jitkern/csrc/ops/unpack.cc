// unpack on the host: checks, descriptors in host memory, the launch, the CPU implementation.
#include <algorithm>
#include <cstring>
#include <string>

#include "unpack_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "unpack";
const DescriptorSites kSites(false);

// Enough blocks to keep the link busy.
constexpr i64 kLinkBlocks = 32;
// Blocks per SM that copy descriptors, besides one that copies the rests of long descriptors.
constexpr i64 kCopiersOfSm = 2;

// Raises IndexError for a part of a descriptor, of a call or of a ring's slot.
template <bool kInRing>
[[noreturn]] void raise_part(const char* op, const char* arg, i64 position, i64 value, i64 bound,
                             const char* note) {
  std::string where = str(" in descriptor ", position);
  if (kInRing) where = str(" in descriptor ", position & 0xffffffff, " of slot ", position >> 32);
  const std::string limit = str("at most ", bound);
  const bool is_side = std::strlen(arg) == 3;  // "src" or "dst"
  const std::string text =
      !is_side    ? str(value, where, ", expected ", value < 0 ? "0 or more" : limit)
      : value < 0 ? str("bytes from ", value, " on", where, ", expected from 0 on")
                  : str("bytes up to ", value, where, ", expected ", limit);
  raise_error("IndexError", str(op, ": ", arg, ": ", text, note));
}

// In the order of DescriptorPart.
constexpr const char* kParts[2][kNumParts] = {
    {"src", "dst", "descriptors[:, 2]", "descriptors[:, 3]"},
    {"src", "dst", "descriptors.len", "descriptors.count"},
};

Rows bytes_of(const char* arg, AnyView value, const char* cure = "") {
  const Tensor tensor(kOp, arg, value);
  tensor.contiguous(cure);
  const i64 bytes = tensor.numel() * tensor.item_bytes();
  return Rows(tensor, 1, bytes, bytes);
}

Indices descriptors_of(AnyView value) {
  const Tensor tensor(kOp, "descriptors", value);
  if (!tensor.has_dtype(kDLInt, 64)) tensor.dtype_error("int64");
  return Indices(tensor);
}

constexpr i64 kMostDescriptors = 1ll << 30;  // in one launch

struct UnpackCall : UnpackSides {
  Indices descriptors;
  CountArg count;
  DescriptorFormat format;
  i64 num_descriptors;

  UnpackCall(AnyView src_arg, AnyView dst_arg, AnyView descriptors_arg, AnyView count_arg)
      : UnpackSides(src_arg, dst_arg), descriptors(descriptors_of(descriptors_arg)) {
    if (descriptors.on_cuda() || !on_gpu().on_cuda()) descriptors.same_device(on_gpu());
    const DLTensor& rows = *descriptors.dl;
    if (rows.ndim != 2 || (rows.shape[1] != kTriples && rows.shape[1] != kSextuples)) {
      descriptors.shape_error(
          "shape [n, 3] of (src_off, dst_off, len), or [n, 6] of (src_off, dst_off, len, count, "
          "src_stride, dst_stride)");
    }
    format = rows.shape[1] == kTriples ? kTriples : kSextuples;
    num_descriptors = rows.shape[0];
    if (!dst.empty()) descriptors.apart_from(dst);
    count = CountArg(kOp, count_arg, descriptors);
    if (!dst.empty()) count.apart_from(dst);
  }

  UnpackParams kernel_params() const {
    UnpackParams params = this->params();
    params.descriptors = descriptors.data;
    params.num_descriptors = static_cast<u32>(num_descriptors);
    count.give_to(params);
    kSites.give_to(params);
    return params;
  }

  // The first `count` descriptors on the CPU, simplified. Each is read once, as memory may change.
  // IndexError for the first that is out of range.
  std::vector<Pieces> checked_descriptors() const {
    const i64 bound = count.read(num_descriptors);
    std::vector<Pieces> list;
    list.reserve(static_cast<size_t>(bound));
    descriptors.with_index([&](const auto at) {
      for (i64 i = 0; i < bound; ++i) {
        const i64 row = i * format;
        Pieces pieces{at(row), at(row + 1), at(row + 2), 1, 0, 0};
        if (format == kSextuples) {
          pieces.count = at(row + 3);
          pieces.src_stride = at(row + 4);
          pieces.dst_stride = at(row + 5);
        }
        const Verdict verdict = verdict_on(pieces, src.row_bytes, dst.row_bytes);
        if (verdict.part != kNumParts) raise_out_of_range(false, i, verdict);
        pieces = simplified(pieces);
        if (!pieces.empty()) list.push_back(pieces);
      }
    });
    return list;
  }
};

KernelTable& kernels() {
  // `own` is the most segments of a descriptor that each of its warps copies.
  static KernelTable table(kOp, {"descriptor_format"}, [](const Spec&, int in_flight, int own) {
    return GroupShape{32, in_flight, own, 1};
  });
  return table;
}

void unpack_op(AnyView src, AnyView dst, AnyView descriptors, AnyView count_arg) {
  const UnpackCall call(src, dst, descriptors, count_arg);
  if (!call.on_gpu().on_cuda()) {
    return unpack_by_cpu(call.dst.data, call.src.data, call.checked_descriptors());
  }
  call.check_sizes();
  if (call.num_descriptors > kMostDescriptors) {
    call.descriptors.value_error(str(call.num_descriptors, " descriptors"), "less in one call");
  }
  const LaunchScope scope(call.on_gpu());
  if (call.num_descriptors == 0) return;
  if (call.descriptors.on_cuda()) return launch_unpack(scope, call.format, call.kernel_params());
  require_no_capture(scope, call.descriptors, "device " + call.on_gpu().device_name());
  // Uploads the descriptors as rows of six.
  UnpackParams params = call.kernel_params();
  const std::vector<Pieces> list = call.checked_descriptors();
  const i64 count = static_cast<i64>(list.size());
  if (count == 0) return;
  static_assert(sizeof(Pieces) == 6 * sizeof(i64), "a row of kSextuples");
  kernels().find(scope.device, Spec(kSextuples));  // compile before the lock
  const auto rows = upload(scope, count, sizeof(Pieces), [&](char* block, i64 begin, i64 here) {
    std::memcpy(block, list.data() + begin, here * sizeof(Pieces));
  });
  params.descriptors = rows.data_ptr();
  params.num_descriptors = static_cast<u32>(count);
  launch_unpack(scope, kSextuples, params);
}

JITKERN_EXPORT_OP(unpack, unpack_op);

}  // namespace

DescriptorSites::DescriptorSites(bool of_ring) {
  for (int part = 0; part < kNumParts; ++part) {
    sites[part] =
        fault_site(kOp, kParts[of_ring][part], of_ring ? raise_part<true> : raise_part<false>,
                   "nothing of that descriptor was copied");
  }
}

void raise_out_of_range(bool of_ring, i64 position, const Verdict& verdict) {
  (of_ring ? raise_part<true> : raise_part<false>)(kOp, kParts[of_ring][verdict.part], position,
                                                   verdict.value, verdict.bound,
                                                   of_ring ? "; nothing of the slot was copied"
                                                           : "; nothing was written");
  std::abort();  // not reached: raise_part has thrown
}

UnpackSides::UnpackSides(AnyView src_arg, AnyView dst_arg)
    : src(bytes_of("src", src_arg, kCopyForReads)), dst(bytes_of("dst", dst_arg)) {
  if (src.on_cuda() && dst.on_cuda()) src.same_device(dst);
  if (dst.ordinal() == src.ordinal() && !dst.empty() && !src.empty()) dst.apart_from(src);
}

void UnpackSides::check_sizes() const {
  if (dst.row_bytes <= kMostBytes) return;
  dst.value_error(str(dst.row_bytes, " bytes"),
                  str("at most ", kMostBytes, " in a copy with a GPU"));
}

UnpackParams UnpackSides::params() const {
  UnpackParams params{};
  params.dst = address_on_gpu(dst);
  params.src = address_on_gpu(src);
  params.dst_bytes = dst.row_bytes;
  params.src_bytes = src.row_bytes;
  params.reads_host = !src.on_cuda();
  params.writes_host = !dst.on_cuda();
  return params;
}

void launch_unpack(const LaunchScope& scope, DescriptorFormat format, UnpackParams params) {
  const i64 num = params.num_descriptors;
  if (num == 0) return;
  const LoadedKernels& loaded = kernels().find(scope.device, Spec(format));
  const Kernel& kernel = loaded.entries[0];
  const i64 warps = kernel.num_threads / 32;
  const i64 sms = scope.device.num_sms;
  // A small destination has no more warps than it has segments.
  const i64 useful = ceil_div(num + params.dst_bytes / 512, warps);
  const i64 link = params.reads_host || params.writes_host ? kLinkBlocks : kCopiersOfSm * sms;
  const i64 copiers = std::min(useful, link);
  // There are no rests if a descriptor's own warps can copy all of the source.
  const i64 own_bytes = std::max<i64>(1, copiers * warps / num) * loaded.shape.splits * 512;
  const i64 dealers =
      std::min(params.src_bytes, params.dst_bytes) < own_bytes ? 0 : std::min(link, sms);
  params.num_copiers = static_cast<u32>(copiers);
  params.fault = scope.device.fault_device;
  scope.launch(kernel, copiers + dealers, params);
}

void unpack_by_cpu(char* dst, const char* src, const std::vector<Pieces>& list) {
  for (const Pieces& p : list) {
    for (i64 i = 0; i < p.count; ++i) {
      std::memcpy(dst + p.dst_off + i * p.dst_stride, src + p.src_off + i * p.src_stride,
                  static_cast<size_t>(p.len));
    }
  }
}

}  // namespace jitkern
