// BlockBuffers: lists of buffers, checked once, with a table of addresses on the GPU.
#include "block_buffers.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <utility>

namespace jitkern {

namespace {

using tvm::ffi::Array;

constexpr const char* kName = "BlockBuffers";

u64 new_id() {
  static std::atomic<u64> last{0};
  return ++last;
}

}  // namespace

BlockBuffers::BlockBuffers(const Array<tvm::ffi::Any>& tensors, i64 num_block_dims)
    : id_(new_id()) {
  if (num_block_dims != 1 && num_block_dims != 2) {
    raise_value_error(kName, "num_block_dims", std::to_string(num_block_dims), "1 or 2");
  }
  if (tensors.empty()) raise_value_error(kName, "tensors", "none", "at least one");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string arg = str("tensors[", i, "]");
    const Tensor tensor(kName, arg.c_str(), tensors[i]);
    tensors_.push_back(tensors[i].cast<tvm::ffi::Tensor>());
    take(static_cast<i64>(i), tensor, num_block_dims);
  }
  device_ = tensors_[0].device();
}

BlockBuffers::BlockBuffers(std::vector<BufferEntry> buffers, i64 num_blocks, DLDevice device)
    : entries_(std::move(buffers)), device_(device), num_blocks_(num_blocks), id_(new_id()) {
  for (const BufferEntry& entry : entries_) {
    are_alike_ &= entry.piece_bytes == entries_[0].piece_bytes;
    bits_ |= entry.address | static_cast<u64>(entry.block_bytes | entry.piece_bytes);
  }
}

// Adds the buffer of a tensor.
void BlockBuffers::take(i64 layer, const Tensor& tensor, i64 num_block_dims) {
  const DLTensor& dl = *tensor.dl;
  const Tensor first(kName, "tensors[0]", tensors_[0]);
  tensor.same_device(first);
  tensor.same_dtype(first);
  if (dl.ndim < num_block_dims) {
    tensor.shape_error(str("at least ", num_block_dims, " dimensions"));
  }
  for (int dim = 0; dim < dl.ndim; ++dim) {
    if (dl.shape[dim] > 1 && tensor.stride(dim) < 0) tensor.refuse_stride(dim);
  }
  // A row is the trailing contiguous dimensions. The other dimensions of a block count its rows.
  i64 row_items = 1, rows = 1, row_stride = 0;
  for (int dim = dl.ndim - 1; dim >= num_block_dims; --dim) {
    const i64 count = dl.shape[dim], stride = tensor.stride(dim);
    if (count == 1) continue;
    if (rows == 1 && stride == row_items) {
      row_items *= count;
    } else if (rows == 1 && (row_items > 1 || dim < dl.ndim - 1)) {
      rows = count, row_stride = stride;
    } else if (rows > 1 && stride == rows * row_stride) {
      rows *= count;
    } else {
      tensor.value_error("strides that make rows of no equal distance of each block (shape " +
                             tensor.shape_text() + ")",
                         "blocks that are contiguous, or contiguous rows at one distance");
    }
  }
  const auto stride_of = [&](int dim) {
    return dl.shape[dim] > 1 ? tensor.stride(dim) * tensor.item_bytes() : 0;
  };
  const i64 parts = num_block_dims == 2 ? dl.shape[1] : 1;
  const BufferEntry entry{address(tensor.data()), stride_of(0),
                          num_block_dims == 2 ? stride_of(1) : 0,
                          rows * row_items * tensor.item_bytes()};
  row_stride *= tensor.item_bytes();
  const auto require = [&](i64 actual, i64& expected, const char* unit) {
    if (layer == 0) expected = actual;
    if (actual == expected) return;
    tensor.value_error(str(actual, unit, " (shape ", tensor.shape_text(), ")"),
                       str(expected, " as in tensors[0]"));
  };
  // copy_blocks divides the number of a block by `parts`, in 32 bits.
  constexpr i64 kMostInParts = i64(1) << 32;
  if (parts > 1 && dl.shape[0] > kMostInParts / parts) {
    tensor.value_error(str("[", dl.shape[0], ", ", parts, "] blocks"),
                       str("at most ", kMostInParts, " in two dimensions"));
  }
  require(dl.shape[0] * parts, num_blocks_, " blocks");
  require(parts, num_parts_, " parts of a block");
  require(rows, num_rows_, " rows of a block");
  require(row_stride, row_stride_, " bytes from one row of a block to the next");
  entries_.push_back(entry);
  if (entry.piece_bytes != entries_[0].piece_bytes) {
    if (entry.piece_bytes == 0 || entries_[0].piece_bytes == 0 || rows > 1) {
      require(entry.piece_bytes, entries_[0].piece_bytes, " bytes of a block");
    }
    are_alike_ = false;
  }
  bits_ |= entry.address | static_cast<u64>(entry.block_bytes | entry.part_bytes | row_stride |
                                            row_items * tensor.item_bytes());
}

std::string BlockBuffers::text() const {
  const auto [least, most] = std::minmax_element(
      entries_.begin(), entries_.end(),
      [](const BufferEntry& a, const BufferEntry& b) { return a.piece_bytes < b.piece_bytes; });
  std::string bytes = str(least->piece_bytes);
  if (!are_alike_) bytes += str(" to ", most->piece_bytes);
  const std::string device = on_cuda() ? str("cuda:", device_.device_id) : "cpu";
  const std::string dtype =
      has_dtype() ? Tensor(kName, "", tensors_[0]).dtype_name() : "trusted addresses";
  return str(entries_.size(), " buffers on ", device, ", ", num_blocks_, " blocks of ", bytes,
             " bytes, ", dtype);
}

// -- overlap -------------------------------------------------------------------------------------

Lattice BlockBuffers::lattice(i64 layer) const {
  const BufferEntry& entry = entries_[layer];
  return Lattice(entry.address, entry.piece_bytes / num_rows_,
                 {{{num_blocks_ / num_parts_, entry.block_bytes},
                   {num_parts_, entry.part_bytes},
                   {num_rows_, row_stride_}}});
}

bool BlockBuffers::overlaps(u64 begin, u64 end) const {
  if (is_empty()) return false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (begin < lattice(i).end && entries_[i].address < end) return true;
  }
  return false;
}

// Two buffers that overlap, one of each list; none if there are none. With one list, of that list.
std::optional<std::pair<i64, i64>> BlockBuffers::overlapping(const BlockBuffers* other) const {
  struct Buffer {
    Lattice lattice;
    i64 layer;
    bool is_other;
  };
  std::vector<Buffer> buffers;
  const auto add = [&buffers](const BlockBuffers& list, bool is_other) {
    for (size_t i = 0; i < list.entries_.size(); ++i) {
      buffers.push_back({list.lattice(i), static_cast<i64>(i), is_other});
    }
  };
  add(*this, false);
  if (other != nullptr) add(*other, true);
  // In the order of addresses only buffers that have begun and not ended can overlap the next one.
  std::sort(buffers.begin(), buffers.end(),
            [](const Buffer& a, const Buffer& b) { return a.lattice.begin < b.lattice.begin; });
  std::vector<const Buffer*> open;
  for (const Buffer& next : buffers) {
    open.erase(
        std::remove_if(open.begin(), open.end(),
                       [&](const Buffer* b) { return b->lattice.end <= next.lattice.begin; }),
        open.end());
    for (const Buffer* before : open) {
      if (other != nullptr && before->is_other == next.is_other) continue;
      if (before->lattice.overlaps(next.lattice)) return {{before->layer, next.layer}};
    }
    open.push_back(&next);
  }
  return std::nullopt;
}

void BlockBuffers::require_no_overlap(const char* op, const char* arg) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_no_overlap_ || is_empty()) return;
  const auto refuse = [&](const std::string& actual) {
    raise_value_error(op, arg, actual, "memory of its own for each block that is written");
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (lattice(i).has_overlap()) refuse(str("buffer ", i, ", whose blocks overlap"));
  }
  if (const auto pair = overlapping(nullptr)) {
    const auto [first, second] = std::minmax(pair->first, pair->second);
    refuse(str("buffer ", second, ", which overlaps buffer ", first));
  }
  has_no_overlap_ = true;
}

bool BlockBuffers::overlaps(const BlockBuffers& other) {
  if (is_empty() || other.is_empty()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (no_overlap_with_ == other.id_) return false;
  if (overlapping(&other)) return true;
  no_overlap_with_ = other.id_;
  return false;
}

// -- on the GPU ----------------------------------------------------------------------------------

// A buffer, first byte to last, as one row.
Rows BlockBuffers::rows_of(i64 layer, const char* op, const char* arg) const {
  const i64 bytes = static_cast<i64>(lattice(layer).end - entries_[layer].address);
  return Rows(Tensor(op, arg, tensors_[layer]), 1, bytes, bytes);
}

bool BlockBuffers::is_one_registration(i64 layer) const {
  return on_cuda() || registration_end(entries_[layer].address) >= lattice(layer).end;
}

const BufferEntry* BlockBuffers::table(const LaunchScope& scope, const char* op, const char* arg) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Table& table = tables_[scope.device.ordinal];
  const bool is_host = !on_cuda();
  const u64 num_closed = num_pools_closed;
  if (table.on_gpu != nullptr && (!is_host || table.num_closed == num_closed)) return table.on_gpu;
  std::vector<BufferEntry> mapped = entries_;
  for (size_t i = 0; is_host && !tensors_.empty() && i < mapped.size(); ++i) {
    const std::string name = str(arg, "[", i, "]");
    mapped[i].address = address(mapped_rows(rows_of(i, op, name.c_str())));
  }
  table.num_closed = num_closed;
  if (table.on_gpu != nullptr) return table.on_gpu;
  if (is_capturing(scope.stream())) {
    raise_value_error(op, arg, "a list that was never used on this GPU, while a graph is captured",
                      "one that a call before the capture has used");
  }
  // Never freed, 32 bytes per layer: kernels of any stream may still read it.
  const i64 bytes = static_cast<i64>(mapped.size() * sizeof(BufferEntry));
  auto& kept = *new tvm::ffi::Tensor(allocate_bytes(bytes, {kDLCUDA, scope.device.ordinal}));
  char* const on_gpu = static_cast<char*>(kept.data_ptr());
  const RelaxedCapture relaxed;
  copy_to_device(on_gpu, reinterpret_cast<const char*>(mapped.data()), bytes, scope.stream());
  const CUevent copied = make_event();
  record(copied, scope.stream());
  wait_for(copied);  // the list may be used on any stream from now on
  JITKERN_CU(cuEventDestroy_v2, copied);
  return table.on_gpu = reinterpret_cast<const BufferEntry*>(on_gpu);
}

// -- for Python ----------------------------------------------------------------------------------

namespace {

tvm::ffi::ObjectRef make_block_buffers(Array<tvm::ffi::Any> tensors, AnyView num_block_dims) {
  return tvm::ffi::ObjectRef(tvm::ffi::make_object<BlockBuffers>(
      tensors, int_arg(kName, "num_block_dims", num_block_dims)));
}

// `ordinal`: the GPU's; -1: the CPU.
tvm::ffi::ObjectRef trust_block_buffers(Array<int64_t> addresses, Array<int64_t> block_bytes,
                                        Array<int64_t> strides, int64_t num_blocks,
                                        int64_t ordinal) {
  std::vector<BufferEntry> entries;
  for (i64 i = 0; i < static_cast<i64>(addresses.size()); ++i) {
    entries.push_back({static_cast<u64>(addresses[i]), strides[i], 0, block_bytes[i]});
  }
  const DLDevice device =
      ordinal < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, static_cast<int32_t>(ordinal)};
  return tvm::ffi::ObjectRef(
      tvm::ffi::make_object<BlockBuffers>(std::move(entries), i64(num_blocks), device));
}

tvm::ffi::String block_buffers_text(AnyView buffers) { return BlockBuffers::of(buffers)->text(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_block_buffers, make_block_buffers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(trust_block_buffers, trust_block_buffers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(block_buffers_text, block_buffers_text);

}  // namespace jitkern
