// copy_blocks on the host: the op, the CPU implementation, the launch of the kernel. Its arguments
// are checked in copy_blocks_args.cc.
#include <algorithm>

#include "copy_blocks_host.h"
#include "host/cpu_copy.h"

namespace jitkern {

namespace {

constexpr const char* kOp = kCopyBlocks;

void run_on_cpu(const BlockCall& call);

void copy_blocks(AnyView src, AnyView dst, AnyView pairs_value, AnyView src_dim, AnyView dst_dim,
                 AnyView method_value, AnyView count, AnyView num_sms, AnyView signals_value) {
  Side src_side("src", src, "src_block_dim", src_dim);
  Side dst_side("dst", dst, "dst_block_dim", dst_dim);
  const PairsArg pairs(pairs_value, count);
  LayerSignals* const signals = LayerSignals::of(signals_value);
  if (signals == nullptr && !is_none(signals_value)) {
    raise_type_error(kOp, "signals", signals_value, "LayerSignals");
  }
  const auto method =
      static_cast<BlockMethod>(choice_arg(kOp, "method", method_value, {"auto", "sm", "engine"}));
  if (method == BlockMethod::kEngine && pairs.on_cuda()) {
    raise_value_error(kOp, "method", "'engine' with pairs on " + pairs.sources->device_name(),
                      "pairs on the CPU, which queues a copy for each, or 'sm'");
  }
  BlockCall call{src_side, dst_side, pairs, signals, method, num_sms_arg(kOp, num_sms)};
  call.check();
  if (call.on_cpu()) {
    if (!call.empty()) run_on_cpu(call);
    if (signals) signals->set_all();
    return;
  }
  const LaunchScope scope(call.on_gpu().device().device_id);
  if (call.empty() && signals == nullptr) return;
  if (pairs.on_cuda()) return copy_blocks_by_sms(scope, call);
  if (call.method != BlockMethod::kEngine) {
    require_no_capture(scope, *pairs.sources,
                       "device " + call.on_gpu().device_name() +
                           ", or method=\"engine\", whose copies keep these pairs");
  }
  const std::vector<Pair> listed = pairs.read(call.src.num_blocks(), call.dst.num_blocks());
  if (call.method == BlockMethod::kEngine || is_for_engine(scope, call)) {
    return copy_blocks_by_engine(scope, call, listed);
  }
  copy_blocks_by_sms(scope, call, &listed);
}

JITKERN_EXPORT_OP(copy_blocks, copy_blocks);

// -- on the CPU ----------------------------------------------------------------------------------

void run_on_cpu(const BlockCall& call) {
  const std::vector<Pair> pairs = call.pairs.read(call.src.num_blocks(), call.dst.num_blocks());
  const i64 rows = call.num_rows;
  for (i64 layer = 0; layer < call.num_layers; ++layer) {
    const BufferEntry from = call.src.entry(layer), to = call.dst.entry(layer);
    copy_rows(static_cast<i64>(pairs.size()) * rows, call.row_bytes(layer), [&](i64 i) {
      const Pair& pair = pairs[static_cast<size_t>(i / rows)];
      const i64 row = i % rows;
      return CpuRow{call.dst.piece(to, pair.dst_row) + row * call.dst.row_stride,
                    call.src.piece(from, pair.src_row) + row * call.src.row_stride};
    });
  }
}

// -- by SMs --------------------------------------------------------------------------------------

// In flight over the link with method "sm": 4 SMs of 16-byte vectors. Pieces of 4 KiB by 1 / 2 / 3
// / 4 SMs: 22.7 / 44.9 / 51.0 / 51.1 GB/s to the GPU, 22.7 / 44.7 / 51.6 / 51.3 to the host. Rows
// of 2 KiB at random in 1.5 GiB by 3 / 4 / 8 SMs: 40.9 / 48.5 / 52.1 to the host.
constexpr i64 kBytesInFlight = 512 << 10;
constexpr i64 kMaxDefaultSms = 8;  // short pieces or vectors cannot fill the link

// The specialisation and the parameters of a call.
struct BlockLaunch {
  CopyBlocksParams params{};
  i64 num_pairs;
  i64 num_segments;  // segments per row: see segments_of
  bool lines_of_dst;
  int vec_bytes;

  BlockLaunch(const LaunchScope& scope, const BlockCall& call) : num_pairs(call.pairs.size) {
    params.dst = side_of(scope, call.dst);
    params.src = side_of(scope, call.src);
    call.pairs.give_to(params);
    params.num_layers = static_cast<u32>(call.num_layers);
    params.num_rows = static_cast<u32>(call.num_rows);
    params.row_bytes = call.src.are_alike() && call.dst.are_alike() ? call.max_row_bytes : 0;
    params.fault = scope.device.fault_device;
    lines_of_dst = !call.over_link() || call.to_host();
    vec_bytes = widest_vec(call.src.bits() | call.dst.bits());
    // A piece begins at a multiple of the lowest set bit, so at most this far into a line.
    const u64 bits = (lines_of_dst ? call.dst : call.src).bits() | kHostLineBytes;
    const i64 max_lead = kHostLineBytes - static_cast<i64>(bits & ~(bits - 1));
    num_segments = segments_of(call.max_row_bytes, max_lead, vec_bytes);
    params.num_segments = static_cast<u32>(num_segments);
  }

  const LoadedKernels& kernels(const LaunchScope& scope, int index_bytes) const {
    static KernelTable table(
        kOp, {"vec_bytes", "index_bytes", "to_host"},
        [](const Spec&, int in_flight, int) { return GroupShape{kWarpLanes, in_flight, 1, 1}; });
    return table.find(scope.device, Spec(vec_bytes, index_bytes, lines_of_dst));
  }

  // Launches num_sms blocks. Default over the link: one beside compute, else enough bytes in
  // flight; within a GPU: all SMs.
  void run(const LaunchScope& scope, const BlockCall& call, const LoadedKernels& kernels,
           const std::vector<Pair>* inline_pairs = nullptr) {
    const double pieces = double(num_pairs) * double(call.num_layers * call.num_rows);
    const double segments = pieces * double(num_segments);
    if (segments > kMostSegments) {
      call.pairs.sources->value_error(str(num_pairs, " pairs of ", call.num_layers, " layers of ",
                                          call.max_row_bytes, " bytes"),
                                      "less in one call");
    }
    params.num_pairs = static_cast<u32>(num_pairs);
    const i64 warps = kernels.entries[0].num_threads / kWarpLanes;
    const i64 row_bytes = call.block_bytes / std::max<i64>(1, call.num_layers * call.num_rows);
    const i64 segment = std::max<i64>(1, row_bytes / std::max<i64>(1, num_segments));
    const i64 batch_bytes = kernels.in_flight * segment;
    i64 blocks = scope.device.num_sms;
    if (call.over_link()) {
      // Beside compute one SM: a decode step takes 1.02 to 1.05 times as long beside a copy to the
      // GPU, 1.01 to 1.03 beside one to the host, 1.05 to 1.08 beside both (33 to 43 GB/s, H200).
      // With 2 SMs, writes paced to 32 GB/s, both took 1.13 to 1.21 (52 to 63 GB/s).
      blocks = call.beside_compute()
                   ? 1
                   : std::min(ceil_div(kBytesInFlight, warps * batch_bytes), kMaxDefaultSms);
    }
    const i64 useful =
        std::max<i64>(1, ceil_div(static_cast<i64>(segments), warps * kernels.in_flight));
    blocks = std::min({useful, call.num_sms.value_or(blocks), i64(scope.device.num_sms)});
    // Last, as everything above may raise: signals that have begun must be set by a copy.
    if (call.signals) params.signals = call.signals->begin(scope);
    if (inline_pairs == nullptr) return scope.launch(kernels.entries[0], blocks, params);
    InlineBlocksParams with_pairs;
    static_cast<CopyBlocksParams&>(with_pairs) = params;
    write_pairs(*inline_pairs, 0, num_pairs, {with_pairs.inline_pairs, 4});
    scope.launch(kernels.entries[0], blocks, with_pairs);
  }

  static void write_pairs(const std::vector<Pair>& pairs, i64 begin, i64 count,
                          const PairList& list) {
    for (i64 i = 0; i < count; ++i) {
      list.set(i, pairs[begin + i].src_row, pairs[begin + i].dst_row);
    }
  }

 private:
  static BlockSide side_of(const LaunchScope& scope, const Side& side) {
    BlockSide params{};
    if (side.list) {
      params.table = side.list->table(scope, kOp, side.arg);
    } else {
      params.first = side.entry(0);
      params.first.address = address(side.grid->on_gpu());
      params.layer_bytes = side.grid->outer_stride;
    }
    params.num_blocks = side.num_blocks();
    params.num_parts = static_cast<u32>(side.num_parts());
    params.row_stride = side.row_stride;
    return params;
  }
};

}  // namespace

// Pairs on the host travel in the parameters of the launch, or are uploaded before it.
void copy_blocks_by_sms(const LaunchScope& scope, const BlockCall& call,
                        const std::vector<Pair>* listed) {
  BlockLaunch launch(scope, call);
  if (listed == nullptr) {
    return launch.run(scope, call, launch.kernels(scope, call.pairs.sources->index_bytes));
  }
  const auto count = static_cast<i64>(listed->size());
  if (count == 0 && call.signals == nullptr) return;
  launch.num_pairs = count;
  launch.params.count = nullptr;
  launch.params.dst_blocks = nullptr;
  const bool narrow = std::max(call.src.num_blocks(), call.dst.num_blocks()) <= i64(1) << 31;
  if (narrow && count <= kInlinePairs) {
    return launch.run(scope, call, launch.kernels(scope, 0), listed);
  }
  const int index_bytes = narrow ? 4 : 8;
  const LoadedKernels& kernels = launch.kernels(scope, index_bytes);
  const auto list = upload(scope, count, 2 * index_bytes, [&](char* block, i64 begin, i64 here) {
    BlockLaunch::write_pairs(*listed, begin, here, {block, index_bytes});
  });
  launch.params.pairs = list.data_ptr();
  launch.run(scope, call, kernels);
}

}  // namespace jitkern
