// h2d_gather of row numbers on the host: its cores gather rows into pinned chunks, the copy engine
// sends these, a small kernel puts rows into place; beside it SMs fetch the others, if they may.
//
// From 64 GiB SMs alone move 31 GB/s of 656-byte rows in order (each page is another miss in the
// link's address translation), 8 and 15 threads alone 28 and 43, SMs and 8 threads together 46 of
// the 48 that a small pool gives.
#include <algorithm>
#include <array>

#include "host/cpu_copy.h"
#include "host_pairs.h"

namespace jitkern {

namespace {

// What SMs take of the rows where nothing is known of such calls yet.
constexpr double kShareOfSms = 0.4;
// Of their share of what is left they get this much at a time, so that they do not end up behind.
constexpr double kAtOnce = 0.85;
constexpr i64 kMinRowsOfSms = 4096;
// As many chunks are in the hands of the threads: one that ends, and the next.
constexpr i64 kChunksInHand = 2;

class GatherByCpu : public ChunkWork {
 public:
  // `placing` are the kernels that put staged rows into place.
  GatherByCpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
              const LoadedKernels& placing, const Lists& lists, bool with_sms, i64 num_threads)
      : ChunkWork(scope, args, num_threads),
        table_(table),
        placing_(placing),
        lists_(lists),
        with_sms_(with_sms),
        traffic_{args.row_bytes, args.span_bytes >> 30, 64 - __builtin_clzll(args.params.num_pairs),
                 num_threads, args.num_sms.value_or(0)} {}

 private:
  void move_block(i64 count) override {
    front_ = 0;
    back_ = count;
    num_fetches_ = rows_of_sms_ = rows_sent_ = num_handed_ = num_sent_ = 0;
    sms_are_busy_ = false;
    start_pairs(count);
    // Threads go on to rows at once: as long as pairs are being checked nothing is sent.
    while (hand_out()) {
    }
    if (with_sms_) {
      on_device_ = allocate({pairs_.bytes(count)}, DLDataType{kDLUInt, 8, 1}, args_.device);
    }
    finish_copy();
    if (block_begin_ == 0) turn_.begin();
    Backoff backoff;
    while (front_ < back_ || num_sent_ < num_handed_) {
      if (feed_sms() || hand_out() || send() || help()) {
        backoff.reset();
      } else {
        backoff.wait();
      }
    }
    learn_share(count);
    staging_.uploads.mark(scope_.stream());
  }

  void finish() override {
    record(staging_.end, staging_.places);
    wait_for(scope_.stream(), staging_.end);
  }

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
    // Later ones are read where they are: their copy would wait behind whole chunks in the copy
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

  // As measured in this call, or in the last one of its kind.
  double share_of_sms() const {
    if (rows_of_sms_ > 0 && rows_sent_ > 0) {
      return double(rows_of_sms_) / double(rows_of_sms_ + rows_sent_);
    }
    const auto known = staging_.sms_shares.find(traffic_);
    return known == staging_.sms_shares.end() ? kShareOfSms : known->second;
  }

  void learn_share(i64 count) {
    if (num_fetches_ == 0 || rows_sent_ == 0) return;
    double share = double(rows_of_sms_) / double(count);
    if (!sms_are_free()) {
      share *= 0.9;  // it was too large, nobody knows by how much
    } else if (num_fetches_ == 1) {
      share *= 1.05 / kAtOnce;  // too small: nothing was left for them when they had fetched it
    }
    staging_.sms_shares[traffic_] = std::clamp(share, 0.05, 0.95);
  }

  // Gives the next chunk to the threads, if they run out of work and one is free.
  bool hand_out() {
    if (front_ == back_ || num_handed_ - num_sent_ == kNumChunks) return false;
    i64 in_hand = 0;
    for (const InWork& work : in_work_) in_hand += work.num_left != 0;
    if (in_hand >= kChunksInHand) return false;
    const i64 number = num_handed_ % kNumChunks;
    if (!is_done(chunks_[number].done)) return false;
    // The first ones are small, so that the link does not wait long for them. Beside SMs, which
    // keep it busy, all are, and the last ones smaller still: both ways then end closer to each
    // other.
    i64 most = shape_.chunk_rows >> std::max<i64>(0, 2 - num_handed_);
    if (with_sms_) {
      const i64 at_once = num_threads() * shape_.part_rows;
      most = std::min(most, std::max(2 * at_once, std::min(4 * at_once, (back_ - front_) / 4)));
    }
    const i64 count = std::min(std::max(most, shape_.part_rows), back_ - front_);
    back_ -= count;
    InWork& work = in_work_[number];
    work.first = back_;
    work.count = count;
    work.num_left = shape_.num_parts();
    publish_moves(++num_handed_ * shape_.num_parts());
    return true;
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
    place(chunk, work.count);
    record(chunk.done, staging_.places);
    rows_sent_ += work.count;
    ++num_sent_;
    return true;
  }

  void place(const Chunk& chunk, i64 count) {
    PairCall call = args_;
    PairCopyParams& p = call.params;
    p.src = chunk.device + shape_.rows_at(count);
    p.src_stride_bytes = args_.row_bytes;
    p.num_src_rows = count;
    p.pairs = chunk.device;
    p.num_pairs = count;
    p.slot_rows = chunk.device + shape_.slot_rows_at(count);
    call.index_bytes = shape_.index_bytes;
    const LaunchScope places(scope_.device, staging_.places);
    launch_pair_copy(places, call, placing_, p, 0);
  }

  void move_rows(i64 number, const InWork& work, i64 begin, i64 end) override {
    args_.pairs.with_index(
        [&](const auto index_at) { stage_rows(index_at, number, work, begin, end); });
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

  KernelTable& table_;
  const LoadedKernels& placing_;
  const Lists lists_;
  const bool with_sms_;
  const Staging::Traffic traffic_;

  // Of the block: SMs take pairs from its front, the CPU from its back.
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

void gather_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                   const Lists& lists, bool with_sms, i64 num_threads) {
  PairCall call = args;
  call.index_bytes = narrow_index_bytes(args);
  // Found in front of everything else: they may have to be compiled.
  if (with_sms) find_pair_kernels(scope, call, table, lists, true);
  call.params.src = nullptr;  // chunks and their rows lie on lines
  call.params.src_stride_bytes = args.row_bytes;
  const LoadedKernels& placing = table.find(scope.device, pair_spec(call, false));
  GatherByCpu(scope, args, table, placing, lists, with_sms, num_threads).run();
}

}  // namespace jitkern
