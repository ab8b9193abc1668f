// Arguments of copy_blocks: reading and checking them.
#include <algorithm>

#include "copy_blocks_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = kCopyBlocks;
constexpr i64 kDefaultBlockDim = 1;  // the default of ops/copy_blocks.py

}  // namespace

// -- pairs ---------------------------------------------------------------------------------------

PairsArg::PairsArg(AnyView pairs, AnyView count_arg) {
  both = pairs.as<tvm::ffi::Array<tvm::ffi::Any>>();
  if (!both || both->size() != 2) {
    const Tensor tensor(kCopyBlocks, "pairs", pairs);
    require_last_dim(tensor, 2, "source block, destination block",
                     "; a tuple of two vectors works too");
    sources.emplace(tensor);
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
  std::vector<Pair> list;
  list.reserve(static_cast<size_t>(bound));
  const char* const src_arg = destinations ? "pairs[0]" : kSrcArg;
  const char* const dst_arg = destinations ? "pairs[1]" : kDstArg;
  const auto add = [&](i64 i, const Pair& pair) {
    if (pair.is_padding()) return;
    pair.require_inside(kCopyBlocks, i, num_src_blocks, num_dst_blocks, src_arg, dst_arg);
    list.push_back(pair);
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
  return list;
}

void PairsArg::give_to(CopyBlocksParams& params) const {
  static const PairSites of_pairs(kCopyBlocks);
  static const PairSites of_vectors(kCopyBlocks, "pairs[0]", "pairs[1]");
  params.src_site = (destinations ? of_vectors : of_pairs).src;
  params.dst_site = (destinations ? of_vectors : of_pairs).dst;
  params.pairs = sources->data;
  params.dst_blocks = destinations ? destinations->data : nullptr;
  count.give_to(params);
}

// -- sides ---------------------------------------------------------------------------------------

// A tensor's blocks are contiguous pieces in every layer.
Side::Side(const char* arg, AnyView value, const char* dim_arg, AnyView block_dim)
    : arg(arg),
      dim_arg(dim_arg),
      list(BlockBuffers::of(value)),
      row_stride(list ? list->row_stride() : 0) {
  if (list == nullptr && value.as<tvm::ffi::Array<tvm::ffi::Any>>()) {
    raise_type_error(kOp, arg, value, "a tensor, or BlockBuffers(list) for a list of tensors");
  }
  dim = int_arg(kOp, dim_arg, block_dim);
  if (list != nullptr) {
    if (dim == kDefaultBlockDim) return;
    raise_value_error(kOp, dim_arg, std::to_string(dim), str("none, as ", arg, " is BlockBuffers"));
  }
  const Tensor tensor(kOp, arg, value);
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

std::string Side::hint_of_dim(i64 num_layers) const {
  if (!grid || grid->inner != num_layers) return "";
  const char* shape = dim == 1 ? "[num_blocks, num_layers, ...]" : "[num_layers, num_blocks, ...]";
  return str("; for ", shape, " pass ", dim_arg, "=", 1 - dim);
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
  const auto require = [this](i64 actual, i64 expected, const char* before,
                              const std::string& after) {
    if (actual == expected) return;
    const auto text = [&](i64 value) { return before + std::to_string(value) + after; };
    src.value_error(text(actual) + src.shape_text(),
                    text(expected) + " as in dst" + dst.shape_text());
  };
  if (src.num_layers() != num_layers) {
    // Caches have more blocks than layers: the side with more layers has them in the other order.
    const bool is_src = src.num_layers() > num_layers;
    const std::string hint =
        is_src ? src.hint_of_dim(num_layers) : dst.hint_of_dim(src.num_layers());
    src.value_error(str(src.num_layers(), " layers", src.shape_text()),
                    str(num_layers, " layers as in dst", dst.shape_text(), hint));
  }
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
  // If a block is contiguous on one side only, that side has the other's rows, one after the other.
  for (Side* side : {&src, &dst}) {
    if (num_rows > 1 && side->num_rows() == 1) side->row_stride = max_row_bytes;
  }
}

void BlockCall::check_memory() const {
  if (dst.list) {
    dst.list->require_no_overlap(kOp, "dst");
  } else {
    dst.grid->distinct_rows();
  }
  if (src.on_cuda() == dst.on_cuda()) {
    bool overlaps = false;
    if (src.list && dst.list) {
      overlaps = src.list != dst.list && dst.list->overlaps(*src.list);
    } else if (src.list || dst.list) {
      const Grid& grid = src.list ? *dst.grid : *src.grid;
      overlaps = (src.list ? src.list : dst.list)->overlaps(grid.begin, grid.end);
    } else if (!dst.grid->is_same_place_as(*src.grid)) {
      dst.grid->apart_from(*src.grid);
    }
    if (overlaps) dst.value_error("overlaps src", kOwnMemory);
  }
  if (dst.empty()) return;
  const auto check = [this](const Indices& list) {
    if (dst.grid) return list.apart_from(dst.grid->whole());
    const u64 begin = address(list.data);
    if (dst.list->overlaps(begin, begin + static_cast<u64>(list.count * list.index_bytes))) {
      list.value_error("overlaps dst", kOwnMemory);
    }
  };
  check(*pairs.sources);
  if (pairs.destinations) check(*pairs.destinations);
  if (pairs.count.indices) check(*pairs.count.indices);
}

void BlockCall::check_signals() const {
  const auto refuse = [](const std::string& actual, const std::string& expected) {
    raise_value_error(kOp, "signals", actual, expected);
  };
  if (const i64 count = signals->num_layers(); num_layers % count != 0) {
    refuse(str(count, " layers"), str("a number that divides the ", num_layers, " of dst"));
  }
  if (const int ordinal = signals->ordinal();
      ordinal != (on_gpu().on_cuda() ? on_gpu().device().device_id : -1)) {
    refuse(ordinal < 0 ? "of the CPU" : "of cuda:" + std::to_string(ordinal),
           "signals of " + on_gpu().device_name());
  }
  if (method == BlockMethod::kEngine) {
    refuse("with method=\"engine\"", "'auto' or 'sm', whose kernel sets them");
  }
}

// Copies a block whose layers are contiguous on both sides as one piece. The layers' stride becomes
// 0: the stride of a dimension of size 1 may be one item, and vectors of one item reach 18 GB/s,
// not 50.
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

}  // namespace jitkern
