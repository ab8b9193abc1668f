// BlockBuffers, a list of buffers as one side of copy_blocks; LayerSignals.
#pragma once

#include <tvm/ffi/object.h>

#include <mutex>
#include <vector>

#include "common.h"
#include "copy_blocks.h"

namespace jitkern {

// One buffer per layer, checked once. All have the same number of blocks.
class BlockBuffers : public tvm::ffi::Object {
 public:
  // The first `num_block_dims` dimensions of each tensor (1 or 2) count its blocks.
  BlockBuffers(const tvm::ffi::Array<tvm::ffi::Any>& tensors, i64 num_block_dims);
  // Contiguous blocks at trusted addresses.
  BlockBuffers(std::vector<BufferEntry> buffers, i64 num_blocks, DLDevice device);

  // The BlockBuffers that `value` holds, else null.
  static BlockBuffers* of(AnyView value) {
    return const_cast<BlockBuffers*>(value.as<BlockBuffers>());
  }

  const std::vector<BufferEntry>& entries() const { return entries_; }  // addresses are the host's
  DLDevice device() const { return device_; }
  bool on_cuda() const { return device_.device_type == kDLCUDA; }
  bool has_dtype() const { return !tensors_.empty(); }
  const tvm::ffi::Tensor& tensor(i64 layer) const { return tensors_[layer]; }
  i64 num_blocks() const { return num_blocks_; }  // counts parts as blocks
  i64 num_parts() const { return num_parts_; }
  i64 num_rows() const { return num_rows_; }  // per block
  i64 row_stride() const { return row_stride_; }
  bool are_alike() const { return are_alike_; }  // blocks of all layers have equally many bytes
  u64 bits() const { return bits_; }             // all addresses, strides and sizes, or-ed
  std::string text() const;                      // for repr
  bool is_empty() const { return num_blocks_ == 0 || entries_[0].piece_bytes == 0; }

  // The entries in the memory of the scope's GPU, with its addresses. ValueError if host memory is
  // not pinned, as that of a closed pool, and at first use while a graph is captured.
  const BufferEntry* table(const LaunchScope& scope, const char* op, const char* arg);
  // Whether one copy of the engine may cover any part of a buffer in host memory.
  bool is_one_registration(i64 layer) const;
  // ValueError if blocks overlap; for a list that is written.
  void require_no_overlap(const char* op, const char* arg);
  // Whether a block overlaps a block of another list.
  bool overlaps(const BlockBuffers& other);
  // Whether a buffer, from its first byte to its last, overlaps [begin, end).
  bool overlaps(u64 begin, u64 end) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.BlockBuffers", BlockBuffers, tvm::ffi::Object);

 private:
  void take(i64 layer, const Tensor& tensor, i64 num_block_dims);
  Lattice lattice(i64 layer) const;
  std::optional<std::pair<i64, i64>> overlapping(const BlockBuffers* other) const;
  Rows rows_of(i64 layer, const char* op, const char* arg) const;

  struct Table {
    const BufferEntry* on_gpu = nullptr;
    u64 num_closed = 0;  // num_pools_closed when addresses were looked up
  };

  std::vector<tvm::ffi::Tensor> tensors_;  // empty: addresses are trusted
  std::vector<BufferEntry> entries_;
  DLDevice device_;
  i64 num_blocks_ = 0;
  i64 num_parts_ = 1;
  i64 num_rows_ = 1;
  i64 row_stride_ = 0;
  bool are_alike_ = true;
  u64 bits_ = 0;
  std::mutex mutex_;
  Table tables_[kMaxDevices];
  bool has_no_overlap_ = false;  // set by require_no_overlap()
  const u64 id_;
  u64 no_overlap_with_ = 0;  // the id of the last list checked by overlaps()
};

// Flags in pinned host memory, which a copy sets layer by layer. One copy at a time.
class LayerSignals : public tvm::ffi::Object {
 public:
  // Both [num_layers], int32, 0; `num_past` on the GPU, or on the CPU for copies on the CPU.
  LayerSignals(tvm::ffi::Tensor flags, tvm::ffi::Tensor num_past);
  ~LayerSignals();

  static LayerSignals* of(AnyView value) {
    return const_cast<LayerSignals*>(value.as<LayerSignals>());
  }

  i64 num_layers() const { return num_past_.size(0); }
  int ordinal() const { return ordinal_; }
  // The parameters of the kernel to be launched next on the scope's stream.
  LayerFlags begin(const LaunchScope& scope);
  // After a copy on the CPU.
  void set_all();
  // Makes a stream wait for the layer of the last copy.
  void wait(i64 layer, CUstream stream);
  bool is_done(i64 layer) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.LayerSignals", LayerSignals, tvm::ffi::Object);

 private:
  u32* flags() const;  // the host's address
  bool are_all_done() const;

  tvm::ffi::Tensor flags_, num_past_;
  int ordinal_;  // the GPU's; -1: the CPU
  u32* on_gpu_ = nullptr;
  u32 generation_ = 0;  // the number of copies, which a copy writes to its flags
  CUstream stream_ = nullptr;
};

}  // namespace jitkern
