// h2d_gather of pairs on the CPU. CPU threads gather rows into pinned chunks, the copy engine sends
// the chunks, a small kernel copies the rows to their places. SMs may fetch other rows meanwhile.
//
// SMs wait for the link's address translation: in a large pool even sorted rows miss once per page.
// 656-byte rows from 64 GiB, GB/s: SMs 30; 8 and 15 threads 23 and 38; SMs with as many threads 42
// and 47. SMs from 0.2 GiB: 48.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "host/cpu_copy.h"
#include "host/workers.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

// Pairs of a block: as int64, half of Uploads. A block is written while the one before is read.
constexpr i64 kBlockPairs = i64(512) << 10;
constexpr i64 kPartPairs = 4096;
constexpr i64 kPartBytes = 64 << 10;  // 20 us on a core; the caller's sends nothing meanwhile
constexpr i64 kMaxPartRows = 2048;
constexpr i64 kStagedRowsAhead = 8;  // rows from the prefetch to the copy

// The layout of a chunk: pairs for the copy kernel, rows of the slot map if there is one, rows.
struct ChunkShape {
  i64 row_bytes;
  i64 part_rows;  // of a part, which one thread gathers
  i64 chunk_rows;
  int index_bytes;
  bool has_slot_map;

  // ValueError for rows too large for a chunk.
  ChunkShape(const PairArgs& args, int index_bytes)
      : row_bytes(args.row_bytes),
        index_bytes(index_bytes),
        has_slot_map(args.params.slot_map != nullptr) {
    const i64 most = kChunkBytes - kHostLineBytes - 3 * index_bytes;
    if (row_bytes > most) {
      args.src.value_error(
          str("rows of ", row_bytes, " bytes"),
          str("at most ", most, " through the CPU; pin the host's memory, for method=\"sm\""));
    }
    part_rows = std::clamp<i64>(kPartBytes / row_bytes, 1, kMaxPartRows);
    chunk_rows =
        (kChunkBytes - kHostLineBytes) / (row_bytes + (has_slot_map ? 3 : 2) * index_bytes);
    if (chunk_rows > part_rows) chunk_rows = chunk_rows / part_rows * part_rows;
  }

  i64 num_parts() const { return ceil_div(chunk_rows, part_rows); }
  i64 slot_rows_at(i64 count) const { return 2 * count * index_bytes; }
  i64 rows_at(i64 count) const {
    const i64 bytes = slot_rows_at(count) + (has_slot_map ? count * index_bytes : 0);
    return ceil_div(bytes, kHostLineBytes) * kHostLineBytes;
  }
  i64 bytes(i64 count) const { return rows_at(count) + count * row_bytes; }
};

// SMs get this part of their share of the remaining rows at a time, so as not to end last.
constexpr double kFetchShare = 0.85;
constexpr i64 kMinRowsOfSms = 4096;
// Chunks that threads gather at a time: they begin one while the last parts of another are done.
constexpr i64 kMaxOpenChunks = 2;

void prefetch_row(const char* row, i64 row_bytes) {
  constexpr i64 kMostBytes = 1024;  // the processor prefetches the rest
  for (i64 at = 0; at < std::min(row_bytes, kMostBytes); at += 64) __builtin_prefetch(row + at);
}

// A call through chunks. Threads take numbered parts of work. The first parts of a block check and
// copy its pairs, the others gather rows. A chunk's parts are published when the chunk is free.
class GatherByCpu {
 public:
  // `kernels` copy rows from chunks to the GPU's tensor.
  GatherByCpu(const LaunchScope& scope, const PairArgs& args, const LoadedKernels& kernels,
              bool with_sms, i64 num_threads)
      : args_(args),
        num_threads_(num_threads),
        scope_(scope),
        shape_(args, narrow_index_bytes(args)),
        staging_(Staging::get(scope)),
        turn_(staging_, scope.stream()),
        chunks_(staging_.chunks()),
        kernels_(kernels),
        with_sms_(with_sms) {}

  // Publishes parts and queues work on the GPU; this thread takes parts too. Call it once.
  void run() {
    Workers workers(std::min(num_threads_ - 1, args_.bytes() / kPartBytes), [this] {
      for (i64 number; (number = parts_.take()) >= 0;) do_part(number);
    });
    workers_ = &workers;
    struct Closing {
      Parts& parts;
      ~Closing() { parts.close(); }
    } const closing{parts_};
    const i64 num_pairs = args_.params.num_pairs;
    if (num_pairs > kBlockPairs) {  // check all pairs first
      start_copy({}, num_pairs);
      finish_copy();
    }
    for (block_begin_ = 0; block_begin_ < num_pairs; block_begin_ += kBlockPairs) {
      const i64 count = std::min(kBlockPairs, num_pairs - block_begin_);
      pairs_ = {staging_.uploads.take(PairList::bytes(count, shape_.index_bytes)),
                shape_.index_bytes};
      start_copy(pairs_, count);
      front_ = 0;
      back_ = count;
      num_fetches_ = rows_of_sms_ = rows_sent_ = chunks_published_ = chunks_sent_ = 0;
      sms_are_busy_ = false;
      // Threads go on to rows at once. Nothing is sent before all pairs are checked.
      while (publish_chunk()) {
      }
      if (with_sms_) on_device_ = allocate_bytes(pairs_.bytes(count), args_.device);
      finish_copy();
      if (block_begin_ == 0) turn_.begin();
      for (Backoff backoff; front_ != back_ || chunks_sent_ != chunks_published_;) {
        feed_sms() || publish_chunk() || send() || help() ? backoff.reset() : backoff.wait();
      }
      update_share(count);
      staging_.uploads.mark(scope_.stream());
    }
    record(staging_.end, staging_.places);
    wait_for(scope_.stream(), staging_.end);
    turn_.finish();
  }

 private:
  struct ChunkWork {
    i64 first;
    i64 count;
    std::atomic<i64> num_left;  // parts to be done
  };

  // -- by CPU threads

  void publish(i64 count) {
    parts_.publish(count);
    workers_->wake();
  }

  // Publishes parts that check `count` pairs and copy them to `list`, if it has memory.
  void start_copy(const PairList& list, i64 count) {
    list_ = list;
    block_end_ = block_begin_ + count;
    num_checked_ = 0;
    first_check_ = parts_.published();
    first_move_ = first_check_ + ceil_div(count, kPartPairs);
    publish(first_move_);
  }

  // Does parts until all pairs are checked. IndexError if the block is the whole call. Otherwise
  // pairs were checked before; those that have become invalid since are padding.
  void finish_copy() {
    for (Backoff backoff; num_checked_.load() < first_move_ - first_check_;) {
      help() ? backoff.reset() : backoff.wait();
    }
    const bool is_all = block_end_ - block_begin_ == args_.params.num_pairs;
    if (any_outside_ && is_all) args_.check_pairs();
  }

  // Does a part that no thread has taken, if there is one.
  bool help() {
    const i64 number = parts_.try_take();
    if (number >= 0) do_part(number);
    return number >= 0;
  }

  void do_part(i64 number) {
    if (number >= first_move_) return move_part(number - first_move_);
    const i64 begin = block_begin_ + (number - first_check_) * kPartPairs;
    const i64 end = std::min(block_end_, begin + kPartPairs);
    if (copy_pairs(args_, list_, block_begin_, begin, end)) any_outside_ = true;
    num_checked_.fetch_add(1);
  }

  void move_part(i64 part) {
    const i64 number = part / shape_.num_parts() % kNumChunks;
    ChunkWork& work = chunk_work_[number];
    const i64 begin = part % shape_.num_parts() * shape_.part_rows;
    const i64 end = std::min(work.count, begin + shape_.part_rows);
    args_.pairs.with_index(
        [&](const auto index_at) { stage_rows(index_at, number, work, begin, end); });
    work.num_left.fetch_sub(1);
  }

  // Gathers rows [begin, end) of a chunk. Pairs may be unchecked: invalid ones are skipped.
  template <class IndexAt>
  void stage_rows(const IndexAt index_at, i64 number, const ChunkWork& work, i64 begin, i64 end) {
    char* const base = chunks_[number].host;
    char* const rows = base + shape_.rows_at(work.count);
    const PairList chunk_pairs{base, shape_.index_bytes};
    const PairList slots{base + shape_.slot_rows_at(work.count), shape_.index_bytes};
    const PairCopyParams& p = args_.params;
    const i64 row_bytes = args_.row_bytes;
    const auto source = [&](const Pair& pair) {
      return args_.src.data + pair.src_row * p.src_stride_bytes;
    };
    const i64 first = block_begin_ + work.first;
    for (i64 i = begin; i < end; ++i) {
      if (i + kStagedRowsAhead < end) {
        const Pair later(index_at, first + i + kStagedRowsAhead);
        if (later.is_inside(p)) prefetch_row(source(later), row_bytes);
      }
      const Pair pair(index_at, first + i);
      const bool inside = pair.is_inside(p);
      chunk_pairs.set(i, inside ? i : -1, pair.dst_row);
      if (shape_.has_slot_map) slots.set_item(i, pair.src_row);
      if (inside) stream_row(rows + i * row_bytes, source(pair), row_bytes);
    }
    end_stream();
  }

  // Publishes the next chunk if it is free and threads need work.
  bool publish_chunk() {
    if (front_ == back_ || chunks_published_ - chunks_sent_ == kNumChunks) return false;
    i64 num_open = 0;
    for (const ChunkWork& work : chunk_work_) num_open += work.num_left != 0;
    if (num_open >= kMaxOpenChunks) return false;
    const i64 number = chunks_published_ % kNumChunks;
    if (!is_done(chunks_[number].done)) return false;
    // The first chunks are small, as the link waits for them. Beside SMs, which keep it busy,
    // chunks have at most 4 parts per thread, the last ones 2: threads and SMs should end together.
    i64 most = shape_.chunk_rows >> std::max<i64>(0, 2 - chunks_published_);
    if (with_sms_) {
      const i64 round_rows = num_threads_ * shape_.part_rows;
      most =
          std::min(most, std::max(2 * round_rows, std::min(4 * round_rows, (back_ - front_) / 4)));
    }
    const i64 count = std::min(std::max(most, shape_.part_rows), back_ - front_);
    back_ -= count;
    ChunkWork& chunk_work = chunk_work_[number];
    chunk_work.first = back_;
    chunk_work.count = count;
    chunk_work.num_left = shape_.num_parts();
    publish(first_move_ + ++chunks_published_ * shape_.num_parts());
    return true;
  }

  // Sends the oldest chunk if all its parts are done, and copies its rows to `dst`.
  bool send() {
    if (chunks_sent_ == chunks_published_) return false;
    const i64 number = chunks_sent_ % kNumChunks;
    const ChunkWork& work = chunk_work_[number];
    if (work.num_left.load() != 0) return false;
    const Chunk& chunk = chunks_[number];
    copy_to_device(chunk.device, chunk.host, shape_.bytes(work.count), staging_.copies);
    record(chunk.copied, staging_.copies);
    wait_for(staging_.places, chunk.copied);
    PairCall call = args_;
    call.set_source(chunk.device + shape_.rows_at(work.count), args_.row_bytes, work.count);
    call.params.slot_rows = chunk.device + shape_.slot_rows_at(work.count);
    call.params.pairs = chunk.device;
    call.params.num_pairs = work.count;
    call.index_bytes = shape_.index_bytes;
    const LaunchScope places(scope_.device, staging_.places);
    launch_pair_copy(places, call, kernels_, call.params, 0);
    record(chunk.done, staging_.places);
    rows_sent_ += work.count;
    ++chunks_sent_;
    return true;
  }

  // -- by SMs

  // Launches the next fetch by SMs, if the last one is done.
  bool feed_sms() {
    if (!with_sms_ || front_ == back_ || !sms_are_free()) return false;
    const i64 left = back_ - front_;
    const i64 count = static_cast<i64>(kFetchShare * share_of_sms() * double(left));
    if (count < (num_fetches_ > 0 ? kMinRowsOfSms : 1)) return false;
    PairCall call = args_;
    const i64 at = pairs_.bytes(front_);
    char* list = static_cast<char*>(pairs_.data) + at;
    if (num_fetches_ == 0) {
      char* const copied = static_cast<char*>(on_device_.data_ptr()) + at;
      copy_to_device(copied, list, pairs_.bytes(count), scope_.stream());
      list = copied;
    }
    // SMs read later lists in host memory: their copy would wait in the copy engine for whole
    // chunks, which costs 2 to 6 % with 15 threads.
    call.params.pairs = list;
    call.params.num_pairs = count;
    call.index_bytes = pairs_.index_bytes;
    launch_pairs(scope_, call);
    record(staging_.fetched, scope_.stream());
    sms_are_busy_ = true;
    ++num_fetches_;
    front_ += count;
    rows_of_sms_ += count;
    return true;
  }

  bool sms_are_free() {
    if (sms_are_busy_) sms_are_busy_ = !is_done(staging_.fetched);
    return !sms_are_busy_;
  }

  // As measured in this block, or at its start in the previous block or call.
  double share_of_sms() const {
    if (rows_of_sms_ > 0 && rows_sent_ > 0) {
      return double(rows_of_sms_) / double(rows_of_sms_ + rows_sent_);
    }
    return staging_.sms_share;
  }

  void update_share(i64 count) {
    if (num_fetches_ == 0 || rows_sent_ == 0) return;
    double share = double(rows_of_sms_) / double(count);
    if (!sms_are_free()) {
      share *= 0.9;  // too large: SMs end last
    } else if (num_fetches_ == 1) {
      share *= 1.05 / kFetchShare;  // too small: too few rows were left for a second fetch
    }
    staging_.sms_share = std::clamp(share, 0.05, 0.95);
  }

  const PairArgs& args_;
  const i64 num_threads_;
  const LaunchScope& scope_;
  const ChunkShape shape_;
  Staging& staging_;
  Staging::Turn turn_;
  Chunk* const chunks_;
  const LoadedKernels& kernels_;
  const bool with_sms_;
  Parts parts_;
  Workers* workers_ = nullptr;       // a local of run()
  std::atomic<i64> num_checked_{0};  // parts
  std::atomic<bool> any_outside_{false};

  // Of the block. The first five are written before its parts are published: threads read them.
  i64 block_begin_ = 0;  // the number of its first pair
  i64 block_end_ = 0;
  i64 first_check_ = 0;
  i64 first_move_ = 0;
  PairList list_{};
  PairList pairs_{};
  std::array<ChunkWork, kNumChunks> chunk_work_{};
  // SMs take pairs from the front, CPU threads from the back.
  tvm::ffi::Tensor on_device_;
  i64 front_ = 0;
  i64 back_ = 0;
  i64 num_fetches_ = 0;
  i64 rows_of_sms_ = 0;
  i64 rows_sent_ = 0;
  i64 chunks_published_ = 0;
  i64 chunks_sent_ = 0;
  bool sms_are_busy_ = false;
};

}  // namespace

int narrow_index_bytes(const PairArgs& args) {
  const i64 most = std::max(args.src.num_rows, args.dst.num_rows);
  return most <= std::numeric_limits<int32_t>::max() ? 4 : 8;
}

bool copy_pairs(const PairArgs& args, const PairList& list, i64 list_begin, i64 begin, i64 end) {
  bool any_outside = false;
  args.pairs.with_index([&](const auto index_at) {
    for (i64 i = begin; i < end; ++i) {
      const Pair pair(index_at, i);
      const bool inside = pair.is_inside(args.params);
      any_outside |= !inside && !pair.is_padding();
      if (list.data == nullptr) continue;
      list.set(i - list_begin, inside ? pair.src_row : -1, inside ? pair.dst_row : -1);
    }
  });
  return any_outside;
}

void gather_by_cpu(const LaunchScope& scope, const PairArgs& args, bool with_sms, i64 num_threads) {
  // Finding kernels may compile them in Python, so no lock may be held.
  PairCall call = args;
  call.index_bytes = narrow_index_bytes(args);
  if (with_sms) find_pair_kernels(scope, call, true);
  call.set_source(nullptr, args.row_bytes, 0);  // the rows of a chunk begin on a line
  const LoadedKernels& kernels = args.table->find(scope.device, pair_spec(call, false));
  GatherByCpu(scope, args, kernels, with_sms, num_threads).run();
}

}  // namespace jitkern
