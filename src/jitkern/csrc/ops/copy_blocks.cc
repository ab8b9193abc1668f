// copy_blocks on the host: checks, CPU implementation, launch of the kernel.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <limits>
#include <string>

#include "copy_blocks_host.h"
#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/staging.h"
#include "host/tuning.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "copy_blocks";
const FaultSite kSrcSite = fault_site(kOp, "pairs[..., 0]");
const FaultSite kDstSite = fault_site(kOp, "pairs[..., 1]");

// What a call has on its way over the link where nothing runs beside it. Of 2 / 3 / 4 / 8 blocks of
// 1,024 threads, of 4 KiB a warp, pieces of 4 KiB come at 36.8 / 48.5 / 49.4 / 49.5 GB/s and go at
// 32.7 / 48.1 / 50.4 / 50.8, pieces of 64 KiB come at 40.1 / 50.8 / 51.2 / 51.1 and go at 52.3 to
// 52.5; one contiguous copy makes 55.4.
constexpr i64 kBytesInFlight = 512 << 10;
// By default half of it, on 2 SMs: each SM that copies to the GPU makes a decode step 2 to 4 %
// longer, at 10 to 16 GB/s beside it, and so do 2 to 8 of a fraction of its threads.
constexpr i64 kBytesBesideCompute = 256 << 10;
constexpr i64 kMaxDefaultSms = 8;  // where pieces or vectors are short, the bus is out of reach

// Between a cache and pages of the host, in device memory: 1.2 ms of the link.
constexpr i64 kStagingBytes = i64(64) << 20;
constexpr i64 kDealSms = 4;

enum class Method { kAuto, kSms, kEngine };

// None is "auto".
Method method_arg(AnyView value, const Indices& pairs) {
  if (is_none(value)) return Method::kAuto;
  constexpr const char* kExpected = "\"auto\", \"sm\" or \"engine\"";
  const auto text = value.as<tvm::ffi::String>();
  if (!text) raise_type_error(kOp, "method", value, kExpected);
  if (*text == "auto") return Method::kAuto;
  if (*text == "sm") return Method::kSms;
  if (*text != "engine") {
    raise_value_error(kOp, "method", "\"" + std::string(*text) + "\"", kExpected);
  }
  if (pairs.on_cuda()) {
    raise_value_error(kOp, "method", "\"engine\" with pairs on " + pairs.device_name(),
                      "pairs on the CPU, which queues a copy for each, or \"sm\"");
  }
  return Method::kEngine;
}

void run_on_cpu(const BlockCall& call) {
  const std::vector<Pair> pairs = call.read_pairs();
  const i64 layers = call.num_layers;
  copy_rows<kRandomBoth>(
      static_cast<i64>(pairs.size()) * layers, call.piece_bytes,
      call.dst.num_blocks * layers * call.piece_bytes, [&call, &pairs, layers](i64 i) {
        const Pair& pair = pairs[static_cast<size_t>(i / layers)];
        const i64 layer = i % layers;
        return CpuRow{call.dst_piece(pair.dst_row) + layer * call.dst.strides.layer_bytes,
                      call.src_piece(pair.src_row) + layer * call.src.strides.layer_bytes};
      });
}

// The largest distance of a piece from the line below it.
i64 max_lead(const char* data, const BlockStrides& strides) {
  const u64 stride_bits = static_cast<u64>(strides.layer_bytes | strides.block_bytes);
  const u64 line = kHostLineBytes;
  if (stride_bits % line == 0) return static_cast<i64>(address(data) % line);
  const u64 bits = address(data) | stride_bits | line;
  return static_cast<i64>(line - (bits & ~(bits - 1)));
}

template <class Item>
void write_pairs(const Pair* pairs, i64 count, Item* items) {
  for (i64 i = 0; i < count; ++i) {
    items[2 * i] = static_cast<Item>(pairs[i].src_row);
    items[2 * i + 1] = static_cast<Item>(pairs[i].dst_row);
  }
}

// How a call is launched: what is compiled for it, and its parameters.
struct BlockLaunch {
  CopyBlocksParams params{};
  bool lines_of_dst;
  int vec_bytes;

  BlockLaunch(const LaunchScope& scope, const BlockCall& call) {
    params.dst = call.dst.data;
    params.src = call.src.data;
    params.dst_strides = call.dst.strides;
    params.src_strides = call.src.strides;
    params.pairs = call.pairs.data;
    if (call.count && call.count->on_cuda()) {
      params.count = call.count->data;
      params.count_bytes = call.count->index_bytes;
    }
    params.num_pairs = call.num_pairs;
    params.num_src_blocks = call.src.num_blocks;
    params.num_dst_blocks = call.dst.num_blocks;
    params.num_layers = call.num_layers;
    params.piece_bytes = call.piece_bytes;
    params.src_site = kSrcSite;
    params.dst_site = kDstSite;
    params.fault = scope.device.fault_device;
    const Blocks* host = call.host_side();
    lines_of_dst = host != &call.src;
    if (host == &call.src) params.src = mapped(call.src);
    if (host == &call.dst) params.dst = mapped(call.dst);
    const auto bits = [](const char* data, const BlockStrides& strides) {
      return address(data) | static_cast<u64>(strides.layer_bytes | strides.block_bytes);
    };
    vec_bytes =
        widest_vec(bits(params.dst, params.dst_strides) | bits(params.src, params.src_strides) |
                   static_cast<u64>(params.piece_bytes));
    const i64 lead = lines_of_dst ? max_lead(params.dst, params.dst_strides)
                                  : max_lead(params.src, params.src_strides);
    params.num_segments = segments_of(params.piece_bytes, lead, vec_bytes);
  }

  // Launches it on as many blocks as the caller says, or by default as have enough bytes on their
  // way over the link; a copy in device memory on all SMs.
  void run(const LaunchScope& scope, const BlockCall& call, const LoadedKernels& kernels,
           const Pair* inline_pairs = nullptr) {
    i64 segments = 0;
    const bool overflows = __builtin_mul_overflow(params.num_pairs, params.num_layers, &segments) ||
                           __builtin_mul_overflow(segments, params.num_segments, &segments);
    // The kernel counts what a warp does at once by 32 bits: 16 TiB of 16-byte vectors.
    if (overflows || segments / kernels.in_flight >= std::numeric_limits<u32>::max()) {
      call.pairs.value_error(std::to_string(params.num_pairs) + " pairs of " +
                                 std::to_string(params.num_layers) + " layers of " +
                                 std::to_string(params.piece_bytes) + " bytes",
                             "less in one call");
    }
    const i64 warps = kernels.entries[0].num_threads / kWarpLanes;
    const i64 segment = std::max<i64>(1, params.piece_bytes / params.num_segments);
    const i64 batch_bytes = kernels.in_flight * segment;
    i64 blocks = scope.device.num_sms;
    if (call.host_side() != nullptr) {
      const i64 in_flight = call.beside_compute ? kBytesBesideCompute : kBytesInFlight;
      blocks = std::min(ceil_div(in_flight, warps * batch_bytes), kMaxDefaultSms);
    }
    const i64 useful = ceil_div(ceil_div(segments, kernels.in_flight), warps);
    blocks = std::min({useful, call.num_sms.value_or(blocks), i64(scope.device.num_sms)});
    if (call.beside_compute && call.host_side() == &call.dst) {
      params.pace_ns = static_cast<u32>(blocks * warps * batch_bytes * 1000 /
                                        figure(scope.device.ordinal, kPacedToHostMbS));
    }
    if (inline_pairs == nullptr) return scope.launch(kernels.entries[0], blocks, params);
    InlineBlocksParams with_pairs;
    static_cast<CopyBlocksParams&>(with_pairs) = params;
    write_pairs(inline_pairs, params.num_pairs, with_pairs.inline_pairs);
    scope.launch(kernels.entries[0], blocks, with_pairs);
  }

 private:
  static char* mapped(const Blocks& blocks) {
    const Rows row = blocks.as_row();
    return mapped_rows(row) + (address(blocks.data) - row.begin);
  }
};

const LoadedKernels& find_kernels(const LaunchScope& scope, const BlockLaunch& launch,
                                  int index_bytes) {
  static KernelTable table(
      kOp, {"vec_bytes", "index_bytes", "to_host"},
      [](const Spec&, int in_flight, int) { return GroupShape{kWarpLanes, in_flight, 1, 1}; });
  return table.find(scope.device, Spec(launch.vec_bytes, index_bytes, launch.lines_of_dst));
}

// Pairs of the host go with the launch, or as an upload in front of it.
void launch_pairs_of_host(const LaunchScope& scope, const BlockCall& call,
                          const std::vector<Pair>& pairs) {
  const auto count = static_cast<i64>(pairs.size());
  if (count == 0) return;
  BlockLaunch launch(scope, call);
  launch.params.num_pairs = count;
  const bool narrow = std::max(call.src.num_blocks, call.dst.num_blocks) <= i64(1) << 31;
  if (narrow && count <= kInlinePairs) {
    return launch.run(scope, call, find_kernels(scope, launch, 0), pairs.data());
  }
  const int index_bytes = narrow ? 4 : 8;
  const LoadedKernels& kernels = find_kernels(scope, launch, index_bytes);  // in front of the lock
  const RelaxedCapture relaxed;
  Staging& staging = Staging::get(scope);
  const std::lock_guard<std::mutex> turn(staging.turn);
  const i64 pair_bytes = 2 * index_bytes;
  const auto list =
      allocate({count * pair_bytes}, DLDataType{kDLUInt, 8, 1}, call.on_gpu().dl->device);
  const i64 most = Uploads::kBytes / 2 / pair_bytes;
  for (i64 begin = 0; begin < count; begin += most) {
    const i64 here = std::min(most, count - begin);
    char* const block = staging.uploads.take(here * pair_bytes);
    const Pair* const part = pairs.data() + begin;
    narrow ? write_pairs(part, here, reinterpret_cast<int32_t*>(block))
           : write_pairs(part, here, reinterpret_cast<int64_t*>(block));
    copy_to_device(static_cast<char*>(list.data_ptr()) + begin * pair_bytes, block,
                   here * pair_bytes, scope.stream());
    staging.uploads.mark(scope.stream());
  }
  launch.params.pairs = list.data_ptr();
  launch.run(scope, call, kernels);
}

// A replay would copy what the pinned memory holds by then.
void require_no_capture(const LaunchScope& scope, const BlockCall& call) {
  int status = 0;
  const Driver& driver = Driver::get();
  driver.check(driver.cuStreamIsCapturing(scope.stream(), &status), "cuStreamIsCapturing");
  if (status == 0) return;
  call.pairs.value_error("device cpu while a graph is captured",
                         "device " + call.on_gpu().device_name() +
                             ", or method=\"engine\", whose copies keep these pairs");
}

// Whether the copy engine moves each piece as fast as SMs, which then stay free.
bool is_for_engine(const LaunchScope& scope, const BlockCall& call) {
  const Blocks* host = call.host_side();
  const Figure most = host == &call.src ? kSmPieceBytes : kSmPieceBytesToHost;
  return host != nullptr && call.piece_bytes > figure(scope.device.ordinal, most) &&
         call.piece_bytes >= kMinBatchBytes && CopyBatch::can_batch(scope);
}

// Whether blocks are pages on the host, all layers of each together, and are not on the GPU.
bool is_for_staging(const LaunchScope& scope, const BlockCall& call) {
  const Blocks* host = call.host_side();
  const i64 block_bytes = call.num_layers * call.piece_bytes;
  return host != nullptr && host->strides.layer_bytes == call.piece_bytes &&
         block_bytes >= kMinBatchBytes && block_bytes <= kStagingBytes &&
         CopyBatch::can_batch(scope);
}

// The engine moves whole pages between the host and staging, SMs deal pieces between staging and
// the cache, at ten times the speed of the link: to the host 33 GB/s beside a decode step, which
// takes 1.04 times as long, and 41 alone; by SMs 30 and 32.
void copy_blocks_by_staging(const LaunchScope& scope, const BlockCall& call,
                            const std::vector<Pair>& pairs) {
  const bool to_host = call.host_side() == &call.dst;
  const i64 block_bytes = call.num_layers * call.piece_bytes;
  const auto count = static_cast<i64>(pairs.size());
  const i64 at_once = std::min(count, kStagingBytes / block_bytes);
  const auto memory =
      allocate({at_once * block_bytes}, DLDataType{kDLUInt, 8, 1}, call.on_gpu().dl->device);
  Blocks staged = call.on_gpu();
  staged.data = static_cast<char*>(memory.data_ptr());
  staged.num_blocks = at_once;
  staged.strides = {call.piece_bytes, block_bytes};
  BlockCall pages = call;
  (to_host ? pages.src : pages.dst) = staged;
  pages.piece_bytes = block_bytes;
  pages.num_layers = 1;
  BlockCall pieces = call;
  (to_host ? pieces.dst : pieces.src) = staged;
  pieces.num_sms = kDealSms;
  for (i64 begin = 0; begin < count; begin += at_once) {
    std::vector<Pair> to_staging, from_staging;
    for (i64 i = begin; i < std::min(count, begin + at_once); ++i) {
      to_staging.push_back({pairs[i].src_row, i - begin});
      from_staging.push_back({i - begin, pairs[i].dst_row});
    }
    if (to_host) {
      launch_pairs_of_host(scope, pieces, to_staging);
      copy_blocks_by_engine(scope, pages, from_staging);
    } else {
      copy_blocks_by_engine(scope, pages, to_staging);
      launch_pairs_of_host(scope, pieces, from_staging);
    }
  }
}

void blocks_op(AnyView src, AnyView dst, AnyView pairs, AnyView src_dim, AnyView dst_dim,
               AnyView method_value, AnyView count, AnyView num_sms) {
  BlockCall call(src, src_dim, dst, dst_dim, pairs, count, num_sms);
  const Method method = method_arg(method_value, call.pairs);
  const bool is_auto = method == Method::kAuto && !call.num_sms;
  call.beside_compute = is_auto;
  if (!call.dst.on_cuda() && !call.src.on_cuda()) {
    if (!call.empty()) run_on_cpu(call);
    return;
  }
  const LaunchScope scope(call.on_gpu());
  if (call.empty()) return;
  if (call.pairs.on_cuda()) {
    BlockLaunch launch(scope, call);
    return launch.run(scope, call, find_kernels(scope, launch, call.pairs.index_bytes));
  }
  if (method != Method::kEngine) require_no_capture(scope, call);
  const std::vector<Pair> listed = call.read_pairs();
  if (method == Method::kEngine || (is_auto && is_for_engine(scope, call))) {
    return copy_blocks_by_engine(scope, call, listed);
  }
  if (is_auto && is_for_staging(scope, call)) return copy_blocks_by_staging(scope, call, listed);
  launch_pairs_of_host(scope, call, listed);
}

JITKERN_EXPORT_OP(copy_blocks, blocks_op);

}  // namespace

}  // namespace jitkern
