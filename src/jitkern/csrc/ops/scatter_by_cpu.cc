// d2h_scatter of row numbers on the host: a small kernel gathers rows in device memory, the copy
// engine brings whole chunks, the host's cores put the rows into place.
#include <algorithm>
#include <array>

#include "host/cpu_copy.h"
#include "host_pairs.h"

namespace jitkern {

namespace {

class ScatterByCpu : public ChunkWork {
 public:
  ScatterByCpu(const LaunchScope& scope, const PairArgs& args, const LoadedKernels& kernels,
               i64 num_threads)
      : ChunkWork(scope, args, num_threads), kernels_(kernels) {}

 private:
  void move_block(i64 count) override {
    start_pairs(count);
    finish_copy();
    if (block_begin_ == 0) turn_.begin();
    front_ = num_sent_ = num_arrived_ = num_done_ = 0;
    Backoff backoff;
    while (front_ < count || num_done_ < num_sent_) {
      if (send(count) || take_in() || free_chunk() || help()) {
        backoff.reset();
      } else {
        backoff.wait();
      }
    }
  }

  // Sends for the next rows, if a chunk is free.
  bool send(i64 num_pairs) {
    if (front_ == num_pairs || num_sent_ - num_done_ == kNumChunks) return false;
    const i64 number = num_sent_ % kNumChunks;
    const Chunk& chunk = chunks_[number];
    if (!is_done(chunk.done)) return false;  // a gather's rows may still be on their way
    InWork& work = in_work_[number];
    work.first = front_;
    work.count = std::min(shape_.chunk_rows, num_pairs - front_);
    work.num_left = shape_.num_parts();
    const PairList taken{chunk.host, shape_.index_bytes};
    for (i64 i = 0; i < work.count; ++i) taken.set(i, pairs_.at(work.first + i).src_row, i);
    copy_to_device(chunk.device, chunk.host, shape_.slot_rows_at(work.count), staging_.places);
    collect(chunk, work.count);
    record(chunk.copied, staging_.places);
    wait_for(staging_.copies, chunk.copied);
    const i64 at = shape_.rows_at(work.count);
    copy_to_host(chunk.host + at, chunk.device + at, work.count * args_.row_bytes, staging_.copies);
    record(chunk.done, staging_.copies);
    front_ += work.count;
    ++num_sent_;
    return true;
  }

  void collect(const Chunk& chunk, i64 count) {
    PairCall call = args_;
    PairCopyParams& p = call.params;
    p.dst = chunk.device + shape_.rows_at(count);
    p.dst_stride_bytes = args_.row_bytes;
    p.num_dst_rows = count;
    p.pairs = chunk.device;
    p.num_pairs = count;
    const LaunchScope places(scope_.device, staging_.places);
    launch_pair_copy(places, call, kernels_, p, 0);
  }

  // Gives the oldest chunk to the threads, once it has arrived.
  bool take_in() {
    if (num_arrived_ == num_sent_ || !is_done(chunks_[num_arrived_ % kNumChunks].done)) {
      return false;
    }
    publish_moves(++num_arrived_ * shape_.num_parts());
    return true;
  }

  // Frees the oldest chunk, once its rows are in their places.
  bool free_chunk() {
    if (num_done_ == num_arrived_ || in_work_[num_done_ % kNumChunks].num_left != 0) return false;
    ++num_done_;
    return true;
  }

  void move_rows(i64 number, const InWork& work, i64 begin, i64 end) override {
    const char* const rows = chunks_[number].host + shape_.rows_at(work.count);
    const i64 row_bytes = args_.row_bytes;
    const auto target = [&](i64 i) -> char* {
      const Pair pair = pairs_.at(work.first + i);
      if (pair.is_padding()) return nullptr;
      return args_.dst.data + pair.dst_row * args_.dst.stride_bytes;
    };
    for (i64 i = begin; i < end; ++i) {
      // Lines that a row shares with its neighbours have to be read.
      char* const later = i + kStagedRowsAhead < end ? target(i + kStagedRowsAhead) : nullptr;
      if (later != nullptr) {
        __builtin_prefetch(later, 1);
        __builtin_prefetch(later + row_bytes - 1, 1);
      }
      if (char* const row = target(i)) stream_row(row, rows + i * row_bytes, row_bytes);
    }
    end_stream();
  }

  const LoadedKernels& kernels_;

  // Of the block.
  i64 front_ = 0;  // pairs that were sent for
  i64 num_sent_ = 0;
  i64 num_arrived_ = 0;
  i64 num_done_ = 0;
};

}  // namespace

void scatter_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                    i64 num_threads) {
  PairCall call = args;
  call.params.dst = nullptr;  // chunks and their rows lie on lines
  call.params.dst_stride_bytes = args.row_bytes;
  call.index_bytes = narrow_index_bytes(args);
  const LoadedKernels& kernels = table.find(scope.device, pair_spec(call, false));
  ScatterByCpu(scope, args, kernels, num_threads).run();
}

}  // namespace jitkern
