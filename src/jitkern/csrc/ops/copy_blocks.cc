// copy_blocks on the host: checks, CPU implementation, launch of the kernel.
#include "copy_blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "host/copy_2d.h"
#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"
#include "pairs_host.h"

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

// -- checks --------------------------------------------------------------------------------------

// A tensor as blocks, each a contiguous piece in every layer. ValueError unless `block_dim` is 0 or
// 1.
Grid blocks_of(const char* arg, AnyView value, const char* dim_arg, AnyView block_dim_value) {
  const Tensor tensor(kOp, arg, value);
  const i64 block_dim = int_arg(kOp, dim_arg, block_dim_value);
  if (block_dim != 0 && block_dim != 1) {
    raise_value_error(kOp, dim_arg, std::to_string(block_dim),
                      "0 or 1, the dimension that counts blocks; the other counts layers");
  }
  if (tensor.dl->ndim < 2) {
    tensor.value_error("shape " + tensor.shape_text(), "at least 2 dimensions");
  }
  const int dim = static_cast<int>(block_dim);
  return Grid(tensor, 1 - dim, dim, 2);
}

// The outer dimension of each side is layers, the inner one blocks. Layers become one if each block
// is one piece on both sides.
struct BlockCall {
  Grid src;
  Grid dst;
  Indices pairs;
  CountArg count;
  std::optional<i64> num_sms;
  bool beside_compute = false;  // the default: few SMs, as a model may run beside the call
  i64 num_layers;
  i64 piece_bytes;
  i64 num_pairs;

  BlockCall(AnyView src, AnyView src_dim, AnyView dst, AnyView dst_dim, AnyView pairs,
            AnyView count, AnyView num_sms);

  bool empty() const { return num_pairs == 0 || dst.empty() || src.empty(); }
  const Grid& on_gpu() const { return dst.on_cuda() ? dst : src; }
  // The side in host memory of a copy with a GPU, or null.
  const Grid* host_side() const {
    if (dst.on_cuda() && src.on_cuda()) return nullptr;
    return dst.on_cuda() ? &src : &dst;
  }
  // The pairs on the CPU that count, each read once, as another thread may write them. IndexError
  // for the first that is out of range.
  std::vector<Pair> read_pairs() const;
};

BlockCall::BlockCall(AnyView src_arg, AnyView src_dim, AnyView dst_arg, AnyView dst_dim,
                     AnyView pairs_arg, AnyView count_arg, AnyView num_sms_value)
    : src(blocks_of("src", src_arg, "src_block_dim", src_dim)),
      dst(blocks_of("dst", dst_arg, "dst_block_dim", dst_dim)),
      pairs(kOp, "pairs", pairs_arg),
      num_sms(num_sms_arg(kOp, num_sms_value)),
      num_layers(dst.outer),
      piece_bytes(dst.row_bytes) {
  src.same_dtype(dst);
  if (src.on_cuda() && dst.on_cuda()) src.same_device(dst);
  if (pairs.on_cuda() || !on_gpu().on_cuda()) pairs.same_device(on_gpu());
  require_last_dim(pairs, 2, "source block, destination block");
  num_pairs = pairs.count / 2;
  const auto require_same = [this](i64 came, i64 expected, const char* before, const char* after) {
    if (came == expected) return;
    const auto text = [&](i64 value) { return before + std::to_string(value) + after; };
    src.value_error(text(came) + " (shape " + src.shape_text() + ")",
                    text(expected) + " as in dst (shape " + dst.shape_text() + ")");
  };
  require_same(src.outer, dst.outer, "", " layers");
  require_same(src.row_bytes, dst.row_bytes, "blocks of ", " bytes a layer");
  dst.distinct_rows();
  if (dst.ordinal() == src.ordinal() && !dst.is_same_place_as(src)) dst.apart_from(src);
  count = CountArg(kOp, count_arg, pairs);
  if (!dst.empty()) {
    const Rows written = dst.whole();
    pairs.apart_from(written);
    count.apart_from(written);
  }
  // A block that is one piece on both sides is copied as such. The layers' stride goes to 0, as
  // that of `[blocks, bytes]`, one item, would make vectors of one item (18 GB/s, not 50).
  const auto is_one_piece = [](const Grid& blocks) {
    return blocks.outer <= 1 || blocks.outer_stride == blocks.row_bytes;
  };
  if (is_one_piece(dst) && is_one_piece(src) && num_layers > 0) {
    piece_bytes *= num_layers;
    num_layers = 1;
    dst.outer_stride = src.outer_stride = 0;
  }
}

std::vector<Pair> BlockCall::read_pairs() const {
  const i64 bound = count.read(num_pairs);
  std::vector<Pair> found;
  found.reserve(static_cast<size_t>(bound));
  pairs.with_index([&](const auto index_at) {
    for (i64 i = 0; i < bound; ++i) {
      const Pair pair(index_at, i);
      if (pair.is_padding()) continue;
      pair.require_inside(kOp, i, src.inner, dst.inner);
      found.push_back(pair);
    }
  });
  return found;
}

void run_on_cpu(const BlockCall& call) {
  const std::vector<Pair> pairs = call.read_pairs();
  const i64 layers = call.num_layers;
  copy_rows<kRandomBoth>(static_cast<i64>(pairs.size()) * layers, call.piece_bytes,
                         call.dst.inner * layers * call.piece_bytes,
                         [&call, &pairs, layers](i64 i) {
                           const Pair& pair = pairs[static_cast<size_t>(i / layers)];
                           return CpuRow{call.dst.row(i % layers, pair.dst_row),
                                         call.src.row(i % layers, pair.src_row)};
                         });
}

// The largest distance of a piece at `data` from the line below it.
i64 max_lead(const char* data, u64 stride_bits) {
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
    params.dst = call.dst.on_gpu();
    params.src = call.src.on_gpu();
    params.dst_strides = {call.dst.outer_stride, call.dst.inner_stride};
    params.src_strides = {call.src.outer_stride, call.src.inner_stride};
    params.pairs = call.pairs.data;
    call.count.give_to(params);
    params.num_pairs = call.num_pairs;
    params.num_src_blocks = call.src.inner;
    params.num_dst_blocks = call.dst.inner;
    params.num_layers = call.num_layers;
    params.piece_bytes = call.piece_bytes;
    params.src_site = kSrcSite;
    params.dst_site = kDstSite;
    params.fault = scope.device.fault_device;
    lines_of_dst = call.host_side() != &call.src;
    const u64 dst_bits = call.dst.stride_bits(), src_bits = call.src.stride_bits();
    vec_bytes = widest_vec(address(params.dst) | dst_bits | address(params.src) | src_bits |
                           static_cast<u64>(params.piece_bytes));
    const i64 lead = lines_of_dst ? max_lead(params.dst, dst_bits) : max_lead(params.src, src_bits);
    params.num_segments = segments_of(params.piece_bytes, lead, vec_bytes);
  }

  // Launches as many blocks as the caller says, or as have enough bytes in flight over the link; a
  // copy in device memory on all SMs.
  void run(const LaunchScope& scope, const BlockCall& call, const LoadedKernels& kernels,
           const Pair* inline_pairs = nullptr) {
    // The kernel counts batches by 32 bits: 16 TiB of 16-byte vectors.
    const double segments =
        double(params.num_pairs) * double(params.num_layers) * double(params.num_segments);
    const double batches = std::ceil(segments / kernels.in_flight);
    if (batches >= std::numeric_limits<u32>::max()) {
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
    const i64 useful = ceil_div(static_cast<i64>(batches), warps);
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
  const bool narrow = std::max(call.src.inner, call.dst.inner) <= i64(1) << 31;
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
  const Grid* host = call.host_side();
  const Grid& dst = call.dst;
  const Grid& src = call.src;
  const bool one_registration = host == nullptr || is_one_registration(host->whole(), kPinCure);
  const CopyKind kind = host == nullptr ? CopyKind::kD2D
                        : host == &src  ? CopyKind::kH2D
                                        : CopyKind::kD2H;
  // A run is one copy if blocks of a layer touch (its rows are longer then) or if there is one
  // layer (each block is a row).
  const auto touch = [&call](const Grid& side) {
    return side.inner_stride == call.piece_bytes &&
           (call.num_layers == 1 || side.outer_stride >= side.inner * call.piece_bytes);
  };
  const bool blocks_touch = touch(dst) && touch(src);
  const bool blocks_are_rows = call.num_layers == 1 && dst.inner_stride >= call.piece_bytes &&
                               src.inner_stride >= call.piece_bytes;
  const bool layers_are_rows = call.num_layers == 1 || (dst.outer_stride >= call.piece_bytes &&
                                                        src.outer_stride >= call.piece_bytes);
  CopyBatch batch(scope, kind);
  const auto queue = [&](const Run& run) {
    if (run.num_blocks == 0) return;
    Copy2D copy{dst.row(0, run.dst_block), src.row(0, run.src_block), dst.outer_stride,
                src.outer_stride,          call.piece_bytes,          call.num_layers};
    if (blocks_touch) {
      copy.width *= run.num_blocks;
    } else if (blocks_are_rows) {
      copy.dst_pitch = dst.inner_stride;
      copy.src_pitch = src.inner_stride;
      copy.height = run.num_blocks;
    }
    if (layers_are_rows) return batch.add(copy, one_registration);
    // Layers that overlap, or are expanded: piece by piece.
    for (i64 layer = 0; layer < call.num_layers; ++layer) {
      Copy2D piece = copy;
      piece.dst += layer * dst.outer_stride;
      piece.src += layer * src.outer_stride;
      piece.height = 1;
      batch.add(piece, one_registration);
    }
  };
  const i64 longest_run = blocks_touch || blocks_are_rows ? call.num_pairs : 1;
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
  const Grid* host = call.host_side();
  const Figure most = host == &call.src ? kSmPieceBytes : kSmPieceBytesToHost;
  return host != nullptr && call.piece_bytes > figure(scope.device.ordinal, most) &&
         call.piece_bytes >= kMinBatchBytes && CopyBatch::can_batch(scope);
}

// Whether blocks are whole pages on the host: all layers of each together.
bool is_for_staging(const LaunchScope& scope, const BlockCall& call) {
  const Grid* host = call.host_side();
  const i64 block_bytes = call.num_layers * call.piece_bytes;
  return host != nullptr && host->outer_stride == call.piece_bytes &&
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
  Grid staged = call.on_gpu();
  staged.data = static_cast<char*>(memory.data_ptr());
  staged.inner = at_once;
  staged.outer_stride = call.piece_bytes;
  staged.inner_stride = block_bytes;
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
