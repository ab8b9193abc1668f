// h2d_gather of row numbers on the host. The CPU's threads gather rows into pinned chunks, the copy
// engine sends these, a small kernel puts rows into place. Beside the threads SMs may fetch rows.
//
// From 64 GiB SMs alone move 31 GB/s of 656-byte rows in order (each page is another miss in the
// link's address translation), 8 and 15 threads alone 28 and 43, SMs and 8 threads together 46 of
// the 48 that a small pool gives.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "host/cpu_copy.h"
#include "host/workers.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

// The pairs of one block of a call: as many as fit into the pinned memory for their copy.
constexpr i64 kBlockPairs = i64(512) << 10;
constexpr i64 kPartPairs = 4096;
constexpr i64 kPartBytes = 64 << 10;  // 20 us of a core, in which nothing is sent or launched
constexpr i64 kMaxPartRows = 2048;
constexpr i64 kStagedRowsAhead = 8;  // between the prefetch and the copy

// How rows are staged in a chunk: pairs of the device's copy, then a row of the slot map for each
// if there is one, then the rows.
struct ChunkShape {
  i64 row_bytes;
  i64 part_rows;  // that one thread moves at a time
  i64 chunk_rows;
  int index_bytes;
  bool has_slot_map;

  // ValueError for rows that no chunk holds.
  ChunkShape(const PairArgs& args, int index_bytes)
      : row_bytes(args.row_bytes),
        index_bytes(index_bytes),
        has_slot_map(args.params.slot_map != nullptr) {
    const i64 most = kChunkBytes - kHostLineBytes - 3 * index_bytes;
    if (row_bytes > most) {
      args.src.value_error("rows of " + std::to_string(row_bytes) + " bytes",
                           "at most " + std::to_string(most) +
                               " through the CPU; pin the host's memory, for method=\"sm\"");
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

// SMs get this much of their share of what is left at a time, so that they do not end last.
constexpr double kAtOnce = 0.85;
constexpr i64 kMinRowsOfSms = 4096;
// Threads have that many chunks: one that ends, and the next.
constexpr i64 kChunksInHand = 2;

// Asks for a row that a thread will copy soon.
void prefetch_row(const char* row, i64 row_bytes) {
  constexpr i64 kMostBytes = 1024;  // the processor sees by itself what follows
  for (i64 at = 0; at < std::min(row_bytes, kMostBytes); at += 64) __builtin_prefetch(row + at);
}

// A call whose rows go through chunks, in parts that threads share. A block of pairs is first
// checked and copied; then its rows are moved, in parts that are published as the GPU gets on.
class GatherByCpu {
 public:
  // `kernels` copy rows from chunks to the GPU's tensor.
  GatherByCpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
              const LoadedKernels& kernels, const Lists& lists, bool with_sms, i64 num_threads)
      : args_(args),
        num_threads_(num_threads),
        scope_(scope),
        shape_(args, narrow_index_bytes(args)),
        staging_(Staging::get(scope)),
        turn_(staging_, scope.stream()),
        chunks_(staging_.chunks()),
        table_(table),
        kernels_(kernels),
        lists_(lists),
        with_sms_(with_sms) {}

  // Leads the other threads. To be called once.
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
    if (num_pairs > kBlockPairs) check_pairs();
    for (block_begin_ = 0; block_begin_ < num_pairs; block_begin_ += kBlockPairs) {
      const i64 count = std::min(kBlockPairs, num_pairs - block_begin_);
      pairs_ = {staging_.uploads.take(PairList::bytes(count, shape_.index_bytes)),
                shape_.index_bytes};
      start_copy(pairs_, count);
      start_block(count);
      finish_copy();
      if (block_begin_ == 0) turn_.begin();
      for (Backoff backoff; front_ != back_ || num_sent_ != num_handed_;) {
        feed_sms() || hand_out() || send() || help() ? backoff.reset() : backoff.wait();
      }
      learn_share(count);
      staging_.uploads.mark(scope_.stream());
    }
    record(staging_.end, staging_.places);
    wait_for(scope_.stream(), staging_.end);
    turn_.finish();
  }

 private:
  // The rows that a chunk is for.
  struct InWork {
    i64 first;
    i64 count;
    std::atomic<i64> num_left;  // parts that no thread has done
  };

  void start_block(i64 count) {
    front_ = 0;
    back_ = count;
    num_fetches_ = rows_of_sms_ = rows_sent_ = num_handed_ = num_sent_ = 0;
    sms_are_busy_ = false;
    // Threads go on to rows at once: nothing is sent while pairs are being checked.
    while (hand_out()) {
    }
    if (with_sms_) {
      on_device_ = allocate_bytes(pairs_.bytes(count), args_.device);
    }
  }

  // -- parts of the CPU's threads

  void publish(i64 count) {
    parts_.publish(count);
    workers_->wake();
  }

  // IndexError for the first pair that is out of range.
  void check_pairs() {
    start_copy({}, args_.params.num_pairs);
    finish_copy();
  }

  // Has `count` pairs of the block checked, and copied to `list` if there is one.
  void start_copy(const PairList& list, i64 count) {
    list_ = list;
    block_end_ = block_begin_ + count;
    num_checked_ = 0;
    first_check_ = parts_.published();
    first_move_ = first_check_ + ceil_div(count, kPartPairs);
    publish(first_move_);
  }

  // Helps until they are. IndexError if the block is the whole call; pairs of others, which have
  // changed since they were checked, are padding by now.
  void finish_copy() {
    for (Backoff backoff; num_checked_.load() < first_move_ - first_check_;) {
      help() ? backoff.reset() : backoff.wait();
    }
    const bool is_all = block_end_ - block_begin_ == args_.params.num_pairs;
    if (any_outside_ && is_all) args_.check_pairs();
  }

  // Does one part that no thread has taken, if there is one.
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
    InWork& work = in_work_[number];
    const i64 begin = part % shape_.num_parts() * shape_.part_rows;
    const i64 end = std::min(work.count, begin + shape_.part_rows);
    args_.pairs.with_index(
        [&](const auto index_at) { stage_rows(index_at, number, work, begin, end); });
    work.num_left.fetch_sub(1);
  }

  // Rows [begin, end) of a chunk, whose pairs may be unchecked as yet.
  template <class IndexAt>
  void stage_rows(const IndexAt index_at, i64 number, const InWork& work, i64 begin, i64 end) {
    char* const base = chunks_[number].host;
    char* const rows = base + shape_.rows_at(work.count);
    const PairList placed{base, shape_.index_bytes};
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
      placed.set(i, inside ? i : -1, pair.dst_row);
      if (shape_.has_slot_map) slots.set_item(i, pair.src_row);
      if (inside) stream_row(rows + i * row_bytes, source(pair), row_bytes);
    }
    end_stream();
  }

  // Gives the next chunk to the threads, if they run out of work and one is free.
  bool hand_out() {
    if (front_ == back_ || num_handed_ - num_sent_ == kNumChunks) return false;
    i64 in_hand = 0;
    for (const InWork& work : in_work_) in_hand += work.num_left != 0;
    if (in_hand >= kChunksInHand) return false;
    const i64 number = num_handed_ % kNumChunks;
    if (!is_done(chunks_[number].done)) return false;
    // The first chunks are small: the link waits for them. Beside SMs, which keep it busy, all are,
    // and the last ones smaller still, so that both ways end at about the same time.
    i64 most = shape_.chunk_rows >> std::max<i64>(0, 2 - num_handed_);
    if (with_sms_) {
      const i64 at_once = num_threads_ * shape_.part_rows;
      most = std::min(most, std::max(2 * at_once, std::min(4 * at_once, (back_ - front_) / 4)));
    }
    const i64 count = std::min(std::max(most, shape_.part_rows), back_ - front_);
    back_ -= count;
    InWork& given = in_work_[number];
    given.first = back_;
    given.count = count;
    given.num_left = shape_.num_parts();
    publish(first_move_ + ++num_handed_ * shape_.num_parts());
    return true;
  }

  // Copies the rows of a chunk's device memory to the GPU's tensor, by the chunk's pairs.
  void copy_on_device(const Chunk& chunk, i64 count) {
    PairCall call = args_;
    call.set_source(chunk.device + shape_.rows_at(count), args_.row_bytes, count);
    call.params.slot_rows = chunk.device + shape_.slot_rows_at(count);
    call.params.pairs = chunk.device;
    call.params.num_pairs = count;
    call.index_bytes = shape_.index_bytes;
    const LaunchScope places(scope_.device, staging_.places);
    launch_pair_copy(places, call, kernels_, call.params, 0);
  }

  // Sends the oldest chunk on its way, if it is full.
  bool send() {
    if (num_sent_ == num_handed_) return false;
    const i64 number = num_sent_ % kNumChunks;
    const InWork& work = in_work_[number];
    if (work.num_left.load() != 0) return false;
    const Chunk& chunk = chunks_[number];
    copy_to_device(chunk.device, chunk.host, shape_.bytes(work.count), staging_.copies);
    record(chunk.copied, staging_.copies);
    wait_for(staging_.places, chunk.copied);
    copy_on_device(chunk, work.count);
    record(chunk.done, staging_.places);
    rows_sent_ += work.count;
    ++num_sent_;
    return true;
  }

  // -- parts of the SMs

  // Launches the next part of the rows that SMs fetch, once they have fetched the last.
  bool feed_sms() {
    if (!with_sms_ || front_ == back_ || !sms_are_free()) return false;
    const i64 left = back_ - front_;
    const i64 count = static_cast<i64>(kAtOnce * share_of_sms() * double(left));
    if (count < (num_fetches_ > 0 ? kMinRowsOfSms : 1)) return false;
    fetch(count);
    return true;
  }

  void fetch(i64 count) {
    PairCall call = args_;
    const i64 at = pairs_.bytes(front_);
    char* list = static_cast<char*>(pairs_.data) + at;
    if (num_fetches_ == 0) {
      char* const copied = static_cast<char*>(on_device_.data_ptr()) + at;
      copy_to_device(copied, list, pairs_.bytes(count), scope_.stream());
      list = copied;
    }
    // Later ones are read where they are: their copy would wait for whole chunks in the copy
    // engine, which costs 15 threads 2 to 6 %.
    call.params.pairs = list;
    call.params.num_pairs = count;
    call.index_bytes = pairs_.index_bytes;
    launch_pairs(scope_, call, table_, lists_);
    record(staging_.fetched, scope_.stream());
    sms_are_busy_ = true;
    ++num_fetches_;
    front_ += count;
    rows_of_sms_ += count;
  }

  bool sms_are_free() {
    if (sms_are_busy_) sms_are_busy_ = !is_done(staging_.fetched);
    return !sms_are_busy_;
  }

  // As measured in this call, or in the last one.
  double share_of_sms() const {
    if (rows_of_sms_ > 0 && rows_sent_ > 0) {
      return double(rows_of_sms_) / double(rows_of_sms_ + rows_sent_);
    }
    return staging_.sms_share;
  }

  void learn_share(i64 count) {
    if (num_fetches_ == 0 || rows_sent_ == 0) return;
    double share = double(rows_of_sms_) / double(count);
    if (!sms_are_free()) {
      share *= 0.9;  // it was too large
    } else if (num_fetches_ == 1) {
      share *= 1.05 / kAtOnce;  // it was too small: nothing was left for a second fetch
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
  KernelTable& table_;
  const LoadedKernels& kernels_;
  const Lists lists_;
  const bool with_sms_;
  Parts parts_;
  Workers* workers_ = nullptr;       // of run()
  std::atomic<i64> num_checked_{0};  // parts
  std::atomic<bool> any_outside_{false};

  // Of the block; the first five are written before its parts are published.
  i64 block_begin_ = 0;  // the number of its first pair
  i64 block_end_ = 0;
  i64 first_check_ = 0;
  i64 first_move_ = 0;
  PairList list_{};
  PairList pairs_{};
  std::array<InWork, kNumChunks> in_work_{};
  // SMs take pairs from its front, the CPU from its back.
  tvm::ffi::Tensor on_device_;
  i64 front_ = 0;
  i64 back_ = 0;
  i64 num_fetches_ = 0;
  i64 rows_of_sms_ = 0;
  i64 rows_sent_ = 0;
  i64 num_handed_ = 0;  // chunks
  i64 num_sent_ = 0;
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

void gather_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                   const Lists& lists, bool with_sms, i64 num_threads) {
  // Kernels may have to be compiled, in Python: find them before taking locks.
  PairCall call = args;
  call.index_bytes = narrow_index_bytes(args);
  if (with_sms) find_pair_kernels(scope, call, table, lists, true);
  call.set_source(nullptr, args.row_bytes, 0);  // chunks and their rows lie on lines
  const LoadedKernels& kernels = table.find(scope.device, pair_spec(call, false));
  GatherByCpu(scope, args, table, kernels, lists, with_sms, num_threads).run();
}

}  // namespace jitkern
