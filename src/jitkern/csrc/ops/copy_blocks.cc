// copy_blocks on the host: checks, CPU implementation, launch of the kernel.
#include <algorithm>
#include <cmath>
#include <limits>

#include "copy_blocks_host.h"
#include "host/cpu_copy.h"
#include "host/link.h"

namespace jitkern {

PairsArg::PairsArg(AnyView pairs, AnyView count_arg) {
  const auto is_tensor = [](const tvm::ffi::Any& one) {
    return one.as<tvm::ffi::Tensor>().has_value();
  };
  both = pairs.as<tvm::ffi::Array<tvm::ffi::Any>>();
  if (!both || both->size() != 2 || !is_tensor((*both)[0]) || !is_tensor((*both)[1])) {
    sources.emplace(kCopyBlocks, "pairs", pairs);
    require_last_dim(*sources, 2, "source block, destination block");
    size = sources->count / 2;
  } else {
    sources.emplace(kCopyBlocks, "pairs[0]", (*both)[0]);
    destinations.emplace(kCopyBlocks, "pairs[1]", (*both)[1]);
    destinations->same_device(*sources);
    destinations->same_dtype(*sources);
    size = sources->count;
    if (destinations->count != size) {
      destinations->value_error(str(destinations->count, " blocks"), str(size, " as in pairs[0]"));
    }
  }
  count = CountArg(kCopyBlocks, count_arg, *sources);
}

std::vector<Pair> PairsArg::read(i64 num_src_blocks, i64 num_dst_blocks) const {
  const i64 bound = count.read(size);
  std::vector<Pair> found;
  found.reserve(static_cast<size_t>(bound));
  const char* const src_arg = destinations ? "pairs[0]" : kSrcArg;
  const char* const dst_arg = destinations ? "pairs[1]" : kDstArg;
  const auto add = [&](i64 i, const Pair& pair) {
    if (pair.is_padding()) return;
    pair.require_inside(kCopyBlocks, i, num_src_blocks, num_dst_blocks, src_arg, dst_arg);
    found.push_back(pair);
  };
  sources->with_index([&](const auto index_at) {
    if (!destinations) {
      for (i64 i = 0; i < bound; ++i) add(i, Pair(index_at, i));
      return;
    }
    destinations->with_index([&](const auto destination_at) {
      for (i64 i = 0; i < bound; ++i) add(i, Pair(index_at(i), destination_at(i)));
    });
  });
  return found;
}

void PairsArg::give_to(CopyBlocksParams& params) const {
  static const PairSites of_pairs(kCopyBlocks);
  static const PairSites of_vectors(kCopyBlocks, "pairs[0]", "pairs[1]");
  params.src_site = (destinations ? of_vectors : of_pairs).src;
  params.dst_site = (destinations ? of_vectors : of_pairs).dst;
  params.pairs = sources->data;
  params.dst_blocks = destinations ? destinations->data : nullptr;
  params.num_pairs = size;
  count.give_to(params);
}

namespace {

constexpr const char* kOp = kCopyBlocks;

// In flight over the link if nothing runs beside the call. Pieces of 4 KiB by 2 / 3 / 4 / 8 SMs
// come at 36.8 / 48.5 / 49.4 / 49.5 GB/s and go at 32.7 / 48.1 / 50.4 / 50.8; one contiguous copy
// makes 55.4.
constexpr i64 kBytesInFlight = 512 << 10;
// By default half of it, on 2 SMs: each SM that copies to the GPU makes a decode step beside it 2
// to 4 % longer.
constexpr i64 kBytesBesideCompute = 256 << 10;
constexpr i64 kMaxDefaultSms = 8;  // short pieces or vectors cannot fill the link
// MB/s that SMs write to the host beside compute; they could write 52,000. A decode step takes 1.03
// to 1.05 times as long, with 2 unpaced SMs 1.05 to 1.28. At 35,000 some steps took 2 to 3 times as
// long, as the host delays all traffic.
constexpr i64 kPacedToHostMbS = 32'000;

}  // namespace

// -- sides ---------------------------------------------------------------------------------------

// A tensor's blocks are contiguous pieces in every layer.
Side::Side(const char* arg, AnyView value, const char* dim_arg, AnyView block_dim)
    : arg(arg), list(BlockBuffers::of(value)), row_stride(list ? list->row_stride() : 0) {
  if (list != nullptr) return;
  const Tensor tensor(kOp, arg, value);
  const i64 dim = int_arg(kOp, dim_arg, block_dim);
  if (dim != 0 && dim != 1) {
    raise_value_error(kOp, dim_arg, std::to_string(dim),
                      "0 or 1, the dimension that counts blocks; the other counts layers");
  }
  if (tensor.dl->ndim < 2) tensor.shape_error("at least 2 dimensions");
  grid.emplace(tensor, 1 - static_cast<int>(dim), static_cast<int>(dim), 2);
}

std::optional<Tensor> Side::tensor() const {
  if (grid) return *grid;
  if (!list->has_dtype()) return std::nullopt;
  return Tensor(kOp, arg, list->tensor(0));
}

BufferEntry Side::entry(i64 layer) const {
  if (list) return list->entries()[layer];
  return {address(grid->data) + static_cast<u64>(layer * grid->outer_stride), grid->inner_stride, 0,
          grid->row_bytes};
}

u64 Side::bits() const {
  const u64 own =
      list ? list->bits()
           : address(grid->data) | grid->stride_bits() | static_cast<u64>(grid->row_bytes);
  return own | static_cast<u64>(row_stride);
}

// -- checks --------------------------------------------------------------------------------------

void BlockCall::check() {
  num_layers = dst.num_layers();
  num_rows = std::max(src.num_rows(), dst.num_rows());
  check_places();
  check_shapes();
  check_memory();
  signals != nullptr ? check_signals() : merge_layers();
}

void BlockCall::check_places() const {
  const auto from = src.tensor(), to = dst.tensor();
  if (from && to) from->same_dtype(*to);
  if (src.on_cuda() && dst.on_cuda() && src.device().device_id != dst.device().device_id) {
    src.value_error("device " + src.device_name(), "device " + dst.device_name() + " as dst");
  }
  if (!pairs.on_cuda() && on_gpu().on_cuda()) return;
  const Indices& list = *pairs.sources;
  if (const auto near = on_gpu().tensor()) return list.same_device(*near);
  if (list.device_name() != on_gpu().device_name()) {
    list.value_error("device " + list.device_name(), "device " + on_gpu().device_name());
  }
}

void BlockCall::check_shapes() {
  const auto require = [this](i64 came, i64 expected, const char* before,
                              const std::string& after) {
    if (came == expected) return;
    const auto text = [&](i64 value) { return before + std::to_string(value) + after; };
    src.value_error(text(came) + src.shape_text(),
                    text(expected) + " as in dst" + dst.shape_text());
  };
  require(src.num_layers(), num_layers, "", " layers");
  if (src.num_rows() > 1 && dst.num_rows() > 1) {
    require(src.num_rows(), dst.num_rows(), "", " rows of a block");
  }
  const bool alike = src.are_alike() && dst.are_alike();
  for (i64 layer = 0; layer < (alike ? 1 : num_layers); ++layer) {
    const i64 bytes = dst.entry(layer).piece_bytes;
    require(src.entry(layer).piece_bytes, bytes, "blocks of ",
            alike ? " bytes a layer" : " bytes in layer " + std::to_string(layer));
    block_bytes += alike ? bytes * num_layers : bytes;
    max_row_bytes = std::max(max_row_bytes, bytes / num_rows);
    if (bytes % num_rows != 0) {
      src.value_error(str(num_rows, " rows of a block"),
                      str("a number that divides its ", bytes, " bytes"));
    }
  }
  // A block that is contiguous on one side only has the other's rows, one after the other.
  for (Side* side : {&src, &dst}) {
    if (num_rows > 1 && side->num_rows() == 1) side->row_stride = max_row_bytes;
  }
}

void BlockCall::check_memory() const {
  if (dst.list) {
    dst.list->require_distinct(kOp, "dst");
  } else {
    dst.grid->distinct_rows();
  }
  if (src.on_cuda() == dst.on_cuda()) {
    bool overlaps = false;
    if (src.list && dst.list) {
      overlaps = src.list != dst.list && dst.list->meets(*src.list);
    } else if (src.list || dst.list) {
      const Grid& grid = src.list ? *dst.grid : *src.grid;
      overlaps = (src.list ? src.list : dst.list)->spans(grid.begin, grid.end);
    } else if (!dst.grid->is_same_place_as(*src.grid)) {
      dst.grid->apart_from(*src.grid);
    }
    if (overlaps) dst.value_error("overlaps src", kOwnMemory);
  }
  if (dst.empty()) return;
  const auto check = [this](const Indices& list) {
    if (dst.grid) return list.apart_from(dst.grid->whole());
    const u64 begin = address(list.data);
    if (dst.list->spans(begin, begin + static_cast<u64>(list.count * list.index_bytes))) {
      list.value_error("overlaps dst", kOwnMemory);
    }
  };
  check(*pairs.sources);
  if (pairs.destinations) check(*pairs.destinations);
  if (pairs.count.indices) check(*pairs.count.indices);
}

void BlockCall::check_signals() const {
  const auto refuse = [](const std::string& came, const std::string& expected) {
    raise_value_error(kOp, "signals", came, expected);
  };
  if (const i64 count = signals->num_layers(); num_layers % count != 0) {
    refuse(str(count, " layers"), str("a number that divides the ", num_layers, " of dst"));
  }
  if (const int of = signals->ordinal();
      of != (on_gpu().on_cuda() ? on_gpu().device().device_id : -1)) {
    refuse(of < 0 ? "of the CPU" : "of cuda:" + std::to_string(of),
           "signals of " + on_gpu().device_name());
  }
  if (method == BlockMethod::kEngine) {
    refuse("with method=\"engine\"", "\"auto\" or \"sm\", whose kernel sets them");
  }
}

// A block that is one piece on both sides is copied as such. The layers' stride goes to 0, as that
// of `[blocks, bytes]`, one item, would make vectors of one item (18 GB/s, not 50).
void BlockCall::merge_layers() {
  if (!src.is_one_piece() || !dst.is_one_piece() || num_layers == 0) return;
  for (Side* side : {&src, &dst}) {
    side->grid->row_bytes *= num_layers;
    side->grid->outer = 1;
    side->grid->outer_stride = 0;
  }
  max_row_bytes *= num_layers;
  num_layers = 1;
}

// -- by the CPU, and by SMs ----------------------------------------------------------------------

namespace {

void run_on_cpu(const BlockCall& call) {
  const std::vector<Pair> pairs = call.pairs.read(call.src.num_blocks(), call.dst.num_blocks());
  const i64 rows = call.num_rows;
  for (i64 layer = 0; layer < call.num_layers; ++layer) {
    const BufferEntry from = call.src.entry(layer), to = call.dst.entry(layer);
    copy_rows<kRandomBoth>(static_cast<i64>(pairs.size()) * rows, call.row_bytes(layer),
                           call.dst.num_blocks() * call.block_bytes, [&](i64 i) {
                             const Pair& pair = pairs[static_cast<size_t>(i / rows)];
                             const i64 row = i % rows;
                             return CpuRow{
                                 call.dst.piece(to, pair.dst_row) + row * call.dst.row_stride,
                                 call.src.piece(from, pair.src_row) + row * call.src.row_stride};
                           });
  }
}

// What is compiled for a call, and its parameters.
struct BlockLaunch {
  CopyBlocksParams params{};
  bool lines_of_dst;
  int vec_bytes;

  BlockLaunch(const LaunchScope& scope, const BlockCall& call) {
    params.dst = side_of(scope, call.dst);
    params.src = side_of(scope, call.src);
    call.pairs.give_to(params);
    params.num_layers = call.num_layers;
    params.num_rows = call.num_rows;
    params.row_bytes = call.src.are_alike() && call.dst.are_alike() ? call.max_row_bytes : 0;
    params.fault = scope.device.fault_device;
    lines_of_dst = !call.over_link() || call.to_host();
    vec_bytes = widest_vec(call.src.bits() | call.dst.bits());
    // A piece begins at a multiple of the lowest bit of these, so this far into a line at most.
    const u64 bits = (lines_of_dst ? call.dst : call.src).bits() | kHostLineBytes;
    const i64 max_lead = kHostLineBytes - static_cast<i64>(bits & ~(bits - 1));
    params.num_segments = segments_of(call.max_row_bytes, max_lead, vec_bytes);
  }

  const LoadedKernels& kernels(const LaunchScope& scope, int index_bytes) const {
    static KernelTable table(
        kOp, {"vec_bytes", "index_bytes", "to_host"},
        [](const Spec&, int in_flight, int) { return GroupShape{kWarpLanes, in_flight, 1, 1}; });
    return table.find(scope.device, Spec(vec_bytes, index_bytes, lines_of_dst));
  }

  // Launches as many blocks as the caller says, or as have enough bytes in flight over the link; a
  // copy in device memory on all SMs.
  void run(const LaunchScope& scope, const BlockCall& call, const LoadedKernels& kernels,
           const std::vector<Pair>* inline_pairs = nullptr) {
    // The kernel counts batches by 32 bits: 16 TiB of 16-byte vectors.
    const double pieces = double(params.num_pairs) * double(call.num_layers * call.num_rows);
    const double batches = std::ceil(pieces * double(params.num_segments) / kernels.in_flight);
    if (batches >= std::numeric_limits<u32>::max()) {
      call.pairs.sources->value_error(str(params.num_pairs, " pairs of ", params.num_layers,
                                          " layers of ", call.max_row_bytes, " bytes"),
                                      "less in one call");
    }
    const i64 warps = kernels.entries[0].num_threads / kWarpLanes;
    const i64 row_bytes = call.block_bytes / std::max<i64>(1, call.num_layers * call.num_rows);
    const i64 segment = std::max<i64>(1, row_bytes / std::max<i64>(1, params.num_segments));
    const i64 batch_bytes = kernels.in_flight * segment;
    i64 blocks = scope.device.num_sms;
    if (call.over_link()) {
      const i64 in_flight = call.beside_compute() ? kBytesBesideCompute : kBytesInFlight;
      blocks = std::min(ceil_div(in_flight, warps * batch_bytes), kMaxDefaultSms);
    }
    const i64 useful = std::max<i64>(1, ceil_div(static_cast<i64>(batches), warps));
    blocks = std::min({useful, call.num_sms.value_or(blocks), i64(scope.device.num_sms)});
    if (call.beside_compute() && call.to_host()) {
      params.pace_ns = static_cast<u32>(blocks * warps * batch_bytes * 1000 /
                                        scaled_to_link(scope.device.ordinal, kPacedToHostMbS));
    }
    // After all that may raise: signals that a copy has begun with must be set by one.
    if (call.signals) params.signals = call.signals->begin(scope);
    if (inline_pairs == nullptr) return scope.launch(kernels.entries[0], blocks, params);
    InlineBlocksParams with_pairs;
    static_cast<CopyBlocksParams&>(with_pairs) = params;
    write_pairs(*inline_pairs, 0, params.num_pairs, {with_pairs.inline_pairs, 4});
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

// Pairs of the host go with the launch, or are uploaded before it.
void copy_blocks_by_sms(const LaunchScope& scope, const BlockCall& call,
                        const std::vector<Pair>* listed) {
  BlockLaunch launch(scope, call);
  if (listed == nullptr) {
    return launch.run(scope, call, launch.kernels(scope, call.pairs.sources->index_bytes));
  }
  const auto count = static_cast<i64>(listed->size());
  if (count == 0 && call.signals == nullptr) return;
  launch.params.num_pairs = count;
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

namespace {

void blocks_op(AnyView src, AnyView dst, AnyView pairs_value, AnyView src_dim, AnyView dst_dim,
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
    raise_value_error(kOp, "method", "\"engine\" with pairs on " + pairs.sources->device_name(),
                      "pairs on the CPU, which queues a copy for each, or \"sm\"");
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
  if (is_for_staging(scope, call)) return copy_blocks_by_staging(scope, call, listed);
  copy_blocks_by_sms(scope, call, &listed);
}

JITKERN_EXPORT_OP(copy_blocks, blocks_op);

}  // namespace

}  // namespace jitkern
