// A list of buffers as one side of copy_blocks, and the signals of its layers.
#pragma once

#include <tvm/ffi/object.h>

#include <mutex>
#include <vector>

#include "common.h"
#include "copy_blocks.h"

namespace jitkern {

// A buffer for each layer, checked once; all have as many blocks.
class BlockBuffers : public tvm::ffi::Object {
 public:
  // The first `block_dims` dimensions of each tensor, 1 or 2, count its blocks.
  BlockBuffers(tvm::ffi::Array<tvm::ffi::Tensor> tensors, i64 block_dims);
  // Contiguous blocks at addresses that are trusted.
  BlockBuffers(std::vector<BufferEntry> buffers, i64 num_blocks, DLDevice device);

  // Of a value that is one, else null.
  static BlockBuffers* of(AnyView value) {
    return const_cast<BlockBuffers*>(value.as<BlockBuffers>());
  }

  const std::vector<BufferEntry>& entries() const { return entries_; }  // with host addresses
  DLDevice device() const { return device_; }
  bool on_cuda() const { return device_.device_type == kDLCUDA; }
  bool has_dtype() const { return !tensors_.empty(); }  // that of all tensors
  const tvm::ffi::Tensor& tensor(i64 layer) const { return tensors_[layer]; }
  i64 num_blocks() const { return num_blocks_; }  // of all parts
  i64 num_parts() const { return num_parts_; }
  i64 num_rows() const { return num_rows_; }  // of each block
  i64 row_stride() const { return row_stride_; }
  bool are_alike() const { return are_alike_; }  // all blocks have as many bytes
  u64 bits() const { return bits_; }             // of all addresses, strides and sizes
  bool is_empty() const { return num_blocks_ == 0 || entries_[0].piece_bytes == 0; }

  // The entries in the memory of the scope's GPU, with addresses as it has them. ValueError if host
  // memory is not pinned, or of a pool that was closed; or while a graph is captured, at first use.
  const BufferEntry* table(const LaunchScope& scope, const char* op, const char* arg);
  // Whether the copy engine may copy any part of a buffer in host memory at once.
  bool is_one_registration(i64 layer) const;
  // ValueError if blocks share a byte; for a list that is written.
  void require_distinct(const char* op, const char* arg);
  // Whether a block shares a byte with one of another list.
  bool meets(const BlockBuffers& other);
  // Whether buffers, first byte to last, share a byte with this memory.
  bool spans(u64 begin, u64 end) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.BlockBuffers", BlockBuffers, tvm::ffi::Object);

 private:
  void take(i64 layer, const Tensor& tensor, i64 block_dims);
  i64 row_bytes(i64 layer) const { return entries_[layer].piece_bytes / num_rows_; }
  u64 end_of(i64 layer) const;
  bool meet(i64 layer, const BlockBuffers& other, i64 other_layer) const;
  Rows rows_of(i64 layer, const char* op, const char* arg) const;

  struct Table {
    const BufferEntry* on_gpu = nullptr;
    u64 num_closed = 0;  // pools, when addresses were looked up
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
  bool are_distinct_ = false;
  const u64 id_;
  u64 apart_from_ = 0;  // the id of a list that shares no byte with this one
};

// Flags in pinned host memory that a copy sets layer by layer. One copy at a time.
class LayerSignals : public tvm::ffi::Object {
 public:
  // `flags` are [2, num_layers] of int32, those of eager calls and those of graphs, all 0;
  // `num_past` as many as layers, on the GPU. On the CPU `num_past` is on the CPU as well.
  LayerSignals(tvm::ffi::Tensor flags, tvm::ffi::Tensor num_past);
  ~LayerSignals();

  static LayerSignals* of(AnyView value) {
    return const_cast<LayerSignals*>(value.as<LayerSignals>());
  }

  i64 num_layers() const { return num_past_.size(0); }
  int ordinal() const { return ordinal_; }
  // What a kernel needs that is launched next on the scope's stream.
  LayerFlags begin(const LaunchScope& scope);
  // For a copy that the CPU has made.
  void set_all();
  // Makes a stream wait for the layer of the last copy.
  void wait(i64 layer, CUstream stream);
  bool is_done(i64 layer) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("jitkern.LayerSignals", LayerSignals, tvm::ffi::Object);

 private:
  u32* flags() const;  // those of the last copy, as the host has them
  bool are_all_done() const;

  tvm::ffi::Tensor flags_, num_past_;
  int ordinal_;  // of the GPU, -1: the CPU
  u32* on_gpu_ = nullptr;
  u32 generation_ = 0;  // of eager copies
  CUstream stream_ = nullptr;
  CUevent armed_ = nullptr;    // the flags of a graph are 0
  bool is_captured_ = false;   // the last copy
  bool was_captured_ = false;  // any copy
};

}  // namespace jitkern
