// copy_blocks on the host: checks, CPU implementation, launch of the kernel.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <limits>
#include <string>

#include "copy_blocks_host.h"
#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "copy_blocks";
const FaultSite kSrcSite = fault_site(kOp, "pairs[..., 0]");
const FaultSite kDstSite = fault_site(kOp, "pairs[..., 1]");

// In flight over the link if nothing runs beside the call. Pieces of 4 KiB by 2 / 3 / 4 / 8 SMs
// come at 36.8 / 48.5 / 49.4 / 49.5 GB/s and go at 32.7 / 48.1 / 50.4 / 50.8; one contiguous copy
// makes 55.4.
constexpr i64 kBytesInFlight = 512 << 10;
// By default half of it, on 2 SMs: each SM that copies to the GPU makes a decode step beside it 2
// to 4 % longer.
constexpr i64 kBytesBesideCompute = 256 << 10;
constexpr i64 kMaxDefaultSms = 8;  // short pieces or vectors cannot fill the link

// Device memory between a cache and pages of the host: 1.2 ms of the link.
constexpr i64 kStagingBytes = i64(64) << 20;
constexpr i64 kDealSms = 4;

enum class BlockMethod : int { kAuto, kSms, kEngine };

BlockMethod method_arg(AnyView value, const Indices& pairs) {
  const auto method =
      static_cast<BlockMethod>(choice_arg(kOp, "method", value, {"auto", "sm", "engine"}));
  if (method == BlockMethod::kEngine && pairs.on_cuda()) {
    raise_value_error(kOp, "method", "\"engine\" with pairs on " + pairs.device_name(),
                      "pairs on the CPU, which queues a copy for each, or \"sm\"");
  }
  return method;
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

void write_pairs(const Pair* pairs, i64 count, const PairList& list) {
  for (i64 i = 0; i < count; ++i) list.set(i, pairs[i].src_row, pairs[i].dst_row);
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
    call.count.give_to(params);
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

  // Launches as many blocks as the caller says, or as have enough bytes in flight over the link; a
  // copy in device memory on all SMs.
  void run(const LaunchScope& scope, const BlockCall& call, const LoadedKernels& kernels,
           const Pair* inline_pairs = nullptr) {
    i64 segments = 0;
    const bool overflows = __builtin_mul_overflow(params.num_pairs, params.num_layers, &segments) ||
                           __builtin_mul_overflow(segments, params.num_segments, &segments);
    // The kernel counts batches by 32 bits: 16 TiB of 16-byte vectors.
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
    write_pairs(inline_pairs, params.num_pairs, {with_pairs.inline_pairs, 4});
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

// Pairs of the host go with the launch, or are uploaded before it.
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
  const LoadedKernels& kernels = find_kernels(scope, launch, index_bytes);
  const auto list = upload(scope, count, 2 * index_bytes, [&](char* block, i64 begin, i64 here) {
    write_pairs(pairs.data() + begin, here, {block, index_bytes});
  });
  launch.params.pairs = list.data_ptr();
  launch.run(scope, call, kernels);
}

// -- by the copy engine --------------------------------------------------------------------------

// Neighbouring pairs whose blocks follow each other on both sides.
struct Run {
  i64 src_block;
  i64 dst_block;
  i64 num_blocks;

  bool takes(const Pair& pair) const {
    return num_blocks > 0 && pair.src_row == src_block + num_blocks &&
           pair.dst_row == dst_block + num_blocks;
  }
};

// One strided copy for each run of pairs.
void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs) {
  const Blocks* host = call.host_side();
  const bool one_registration = host == nullptr || is_one_registration(host->as_row(), kPinCure);
  const BlockStrides& dst = call.dst.strides;
  const BlockStrides& src = call.src.strides;
  // A run is one copy if blocks of a layer touch (its rows are longer then) or if there is one
  // layer (each block is a row). A pitch is not negative.
  const bool blocks_touch =
      dst.block_bytes == call.piece_bytes && src.block_bytes == call.piece_bytes;
  const bool blocks_are_rows = call.num_layers == 1 && dst.block_bytes >= call.piece_bytes &&
                               src.block_bytes >= call.piece_bytes;
  const bool layers_are_rows = call.num_layers == 1 || (dst.layer_bytes >= call.piece_bytes &&
                                                        src.layer_bytes >= call.piece_bytes);
  CopyBatch batch(scope, call.kind());
  const auto queue = [&](const Run& run) {
    if (run.num_blocks == 0) return;
    Copy2D copy{call.dst_piece(run.dst_block),
                call.src_piece(run.src_block),
                dst.layer_bytes,
                src.layer_bytes,
                call.piece_bytes,
                call.num_layers};
    if (blocks_touch) {
      copy.width *= run.num_blocks;
    } else if (blocks_are_rows) {
      copy.dst_pitch = dst.block_bytes;
      copy.src_pitch = src.block_bytes;
      copy.height = run.num_blocks;
    }
    if (layers_are_rows) return batch.add(copy, one_registration);
    // Layers that lie backwards, or whose blocks are expanded: piece by piece.
    for (i64 layer = 0; layer < call.num_layers; ++layer) {
      Copy2D piece = copy;
      piece.dst += layer * dst.layer_bytes;
      piece.src += layer * src.layer_bytes;
      piece.height = 1;
      batch.add(piece, one_registration);
    }
  };
  // Layers of a source may overlap, but a row is no longer than its pitch.
  i64 longest_run = blocks_touch || blocks_are_rows ? call.num_pairs : 1;
  if (blocks_touch && call.num_layers > 1 && layers_are_rows) {
    longest_run = std::min(dst.layer_bytes, src.layer_bytes) / call.piece_bytes;
  }
  Run run{};
  for (const Pair& pair : pairs) {
    if (run.num_blocks < longest_run && run.takes(pair)) {
      ++run.num_blocks;
      continue;
    }
    queue(run);
    run = {pair.src_row, pair.dst_row, 1};
  }
  queue(run);
  batch.flush();
}

// Whether the copy engine is as fast as SMs, which then stay free.
bool is_for_engine(const LaunchScope& scope, const BlockCall& call) {
  const Blocks* host = call.host_side();
  const Figure most = host == &call.src ? kSmPieceBytes : kSmPieceBytesToHost;
  return host != nullptr && call.piece_bytes > figure(scope.device.ordinal, most) &&
         call.piece_bytes >= kMinBatchBytes && CopyBatch::can_batch(scope);
}

// Whether blocks are whole pages on the host: all layers of each together.
bool is_for_staging(const LaunchScope& scope, const BlockCall& call) {
  const Blocks* host = call.host_side();
  const i64 block_bytes = call.num_layers * call.piece_bytes;
  return host != nullptr && host->strides.layer_bytes == call.piece_bytes &&
         block_bytes >= kMinBatchBytes && block_bytes <= kStagingBytes &&
         CopyBatch::can_batch(scope);
}

// The engine moves whole pages between the host and staging; SMs move pieces between staging and
// the cache, at ten times the speed of the link. To the host 33 GB/s beside a decode step (1.04
// times as long) and 41 alone; by SMs 30 and 32.
void copy_blocks_by_staging(const LaunchScope& scope, const BlockCall& call,
                            const std::vector<Pair>& pairs) {
  const bool to_host = call.host_side() == &call.dst;
  const i64 block_bytes = call.num_layers * call.piece_bytes;
  const auto count = static_cast<i64>(pairs.size());
  const i64 at_once = std::min(count, kStagingBytes / block_bytes);
  const auto memory = allocate_bytes(at_once * block_bytes, call.on_gpu().dl->device);
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
  const BlockMethod method = method_arg(method_value, call.pairs);
  const bool is_auto = method == BlockMethod::kAuto && !call.num_sms;
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
  if (method != BlockMethod::kEngine) {
    require_no_capture(scope, call.pairs,
                       "device " + call.on_gpu().device_name() +
                           ", or method=\"engine\", whose copies keep these pairs");
  }
  const std::vector<Pair> listed = call.read_pairs();
  if (method == BlockMethod::kEngine || (is_auto && is_for_engine(scope, call))) {
    return copy_blocks_by_engine(scope, call, listed);
  }
  if (is_auto && is_for_staging(scope, call)) return copy_blocks_by_staging(scope, call, listed);
  launch_pairs_of_host(scope, call, listed);
}

JITKERN_EXPORT_OP(copy_blocks, blocks_op);

}  // namespace

}  // namespace jitkern
