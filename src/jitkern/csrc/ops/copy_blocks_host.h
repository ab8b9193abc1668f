// A call of copy_blocks: its arguments, and the kernels or engines that serve it.
#pragma once

#include <string>
#include <vector>

#include "block_buffers.h"
#include "copy_blocks.h"
#include "pairs_host.h"

namespace jitkern {

constexpr const char* kCopyBlocks = "copy_blocks";

// Pairs of blocks: [..., 2], or one vector of sources and one of destinations.
struct PairsArg {
  std::optional<tvm::ffi::Array<tvm::ffi::Any>> both;
  std::optional<Indices> sources, destinations;  // sources hold pairs if there are no destinations
  CountArg count;
  i64 size = 0;

  PairsArg(AnyView pairs, AnyView count);

  bool on_cuda() const { return sources->on_cuda(); }
  // The first `count` pairs without padding, on the CPU. Each is read once, as another thread may
  // write them. IndexError for the first that is out of range.
  std::vector<Pair> read(i64 num_src_blocks, i64 num_dst_blocks) const;
  void give_to(CopyBlocksParams& params) const;
};

enum class BlockMethod : int { kAuto, kSms, kEngine };

// A tensor [layers, blocks, ...] (a Grid: outer is layers, inner is blocks), or a list of buffers.
struct Side {
  const char* arg;
  const char* dim_arg;
  i64 dim;  // counts blocks
  std::optional<Grid> grid;
  BlockBuffers* list;
  i64 row_stride;  // between the rows of a block

  Side(const char* arg, AnyView value, const char* dim_arg, AnyView block_dim);

  DLDevice device() const { return list ? list->device() : grid->dl->device; }
  bool on_cuda() const { return device().device_type == kDLCUDA; }
  std::string device_name() const { return on_cuda() ? str("cuda:", device().device_id) : "cpu"; }
  // The tensor to name in messages; none for a list of trusted addresses.
  std::optional<Tensor> tensor() const;
  std::string shape_text() const { return grid ? " (shape " + grid->shape_text() + ")" : ""; }
  i64 num_layers() const { return list ? static_cast<i64>(list->entries().size()) : grid->outer; }
  i64 num_blocks() const { return list ? list->num_blocks() : grid->inner; }
  i64 num_parts() const { return list ? list->num_parts() : 1; }
  i64 num_rows() const { return list ? list->num_rows() : 1; }
  bool are_alike() const { return list == nullptr || list->are_alike(); }
  bool empty() const { return list ? list->is_empty() : grid->empty(); }
  // Whether all layers of a block are contiguous.
  bool is_one_piece() const {
    return grid && (grid->outer <= 1 || grid->outer_stride == grid->row_bytes);
  }
  BufferEntry entry(i64 layer) const;
  char* piece(const BufferEntry& entry, i64 block) const {
    return reinterpret_cast<char*>(entry.address) + block / num_parts() * entry.block_bytes +
           block % num_parts() * entry.part_bytes;
  }
  u64 bits() const;
  // The end of an error: the block dimension with which the tensor has `num_layers`, if one has.
  std::string hint_of_dim(i64 num_layers) const;
  [[noreturn]] void value_error(const std::string& actual, const std::string& expected) const {
    raise_value_error(kCopyBlocks, arg, actual, expected);
  }
};

struct BlockCall {
  Side src, dst;
  const PairsArg& pairs;
  LayerSignals* signals;
  BlockMethod method;
  std::optional<i64> num_sms;  // the caller's choice
  // Set by check().
  i64 num_layers = 0;
  i64 num_rows = 0;
  i64 max_row_bytes = 0;
  i64 block_bytes = 0;  // all layers of a block

  // Checks everything but pairs on the CPU.
  void check();

  bool on_cpu() const { return !src.on_cuda() && !dst.on_cuda(); }
  const Side& on_gpu() const { return dst.on_cuda() ? dst : src; }
  bool over_link() const { return src.on_cuda() != dst.on_cuda(); }
  bool to_host() const { return over_link() && src.on_cuda(); }
  bool of_tensors() const { return src.grid && dst.grid; }
  // Whether to use few SMs, so that a concurrent model is slowed little.
  bool beside_compute() const { return method == BlockMethod::kAuto && !num_sms; }
  bool empty() const { return pairs.size == 0 || src.empty() || dst.empty(); }
  i64 row_bytes(i64 layer) const { return dst.entry(layer).piece_bytes / num_rows; }

 private:
  void check_places() const;
  void check_shapes();
  void check_memory() const;
  void check_signals() const;
  void merge_layers();
};

// Copies by SMs. `listed`: pairs on the host; null: the call's pairs are on the GPU.
void copy_blocks_by_sms(const LaunchScope& scope, const BlockCall& call,
                        const std::vector<Pair>* listed = nullptr);

// Whether the copy engine is as fast as SMs, which then stay free: pieces of 16 / 64 / 256 KB reach
// 5 / 55 / 55 GB/s by the engine, 51 by SMs.
bool is_for_engine(const LaunchScope& scope, const BlockCall& call);
void copy_blocks_by_engine(const LaunchScope& scope, const BlockCall& call,
                           const std::vector<Pair>& pairs);
}  // namespace jitkern
