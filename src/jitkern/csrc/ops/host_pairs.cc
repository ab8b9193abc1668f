#include "host_pairs.h"

#include <algorithm>

namespace jitkern {

namespace {

constexpr i64 kPartPairs = 4096;
constexpr i64 kPartBytes = 64 << 10;  // 20 us of a core, in which nothing is sent or launched
constexpr i64 kMaxPartRows = 2048;

}  // namespace

void CpuWork::run(const std::function<void()>& lead) {
  Workers workers(std::min(num_threads_ - 1, bytes_ / kPartBytes), [this] {
    for (i64 number; (number = parts_.take()) >= 0;) do_part(number);
  });
  workers_ = &workers;
  struct Closing {
    Parts& parts;
    ~Closing() { parts.close(); }
  } const closing{parts_};
  lead();
}

void CpuWork::check_pairs() {
  if (args_.params.num_pairs <= kBlockPairs) return;
  start_copy({}, 0, args_.params.num_pairs);
  finish_copy();
}

void CpuWork::start_copy(const PairList& list, i64 begin, i64 count) {
  list_ = list;
  block_begin_ = begin;
  block_end_ = begin + count;
  num_checked_ = 0;
  first_check_ = parts_.published();
  first_move_ = first_check_ + ceil_div(count, kPartPairs);
  publish(first_move_);
}

void CpuWork::publish(i64 count) {
  parts_.publish(count);
  workers_->wake();
}

void CpuWork::finish_copy() {
  for (Backoff backoff; num_checked_.load() < first_move_ - first_check_;) {
    help() ? backoff.reset() : backoff.wait();
  }
  const bool is_all = block_end_ - block_begin_ == args_.params.num_pairs;
  if (any_outside_ && is_all) args_.check_pairs();
}

bool CpuWork::help() {
  const i64 number = parts_.try_take();
  if (number >= 0) do_part(number);
  return number >= 0;
}

void CpuWork::do_part(i64 number) {
  if (number >= first_move_) return move_part(number - first_move_);
  const i64 at = (number - first_check_) * kPartPairs;
  const i64 begin = block_begin_ + at;
  check_part(begin, std::min(block_end_, begin + kPartPairs),
             list_.data == nullptr ? nullptr : &at);
  num_checked_.fetch_add(1);
}

void CpuWork::check_part(i64 begin, i64 end, const i64* to) {
  const i64 last_src_row = args_.params.num_src_rows - 1;
  const i64 last_dst_row = args_.params.num_dst_rows - 1;
  // Wraps around for padding below -2^63 + rows, of which the difference does not count.
  const auto minus = [](i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) - static_cast<u64>(b));
  };
  // By sign bits, without a branch: 0.95 ns a pair, where comparing and branching took 2.3.
  i64 outside = 0;
  const auto check = [&](const auto index_at, const auto& use) {
    for (i64 i = begin; i < end; ++i) {
      const Pair pair(index_at, i);
      const i64 padding = pair.src_row | pair.dst_row;
      const i64 beyond = minus(last_src_row, pair.src_row) | minus(last_dst_row, pair.dst_row);
      outside |= beyond & ~padding;
      const i64 skipped = (padding | beyond) >> 63;
      use(i, pair.src_row | skipped, pair.dst_row | skipped);
    }
  };
  const auto write_to = [&](auto* items) {
    items += to == nullptr ? 0 : 2 * (*to - begin);
    return [items](i64 i, i64 src_row, i64 dst_row) {
      items[2 * i] = static_cast<std::decay_t<decltype(*items)>>(src_row);
      items[2 * i + 1] = static_cast<std::decay_t<decltype(*items)>>(dst_row);
    };
  };
  args_.pairs.with_index([&](const auto index_at) {
    if (to == nullptr) {
      check(index_at, [](i64, i64, i64) {});
    } else if (list_.index_bytes == 4) {
      check(index_at, write_to(static_cast<int32_t*>(list_.data)));
    } else {
      check(index_at, write_to(static_cast<int64_t*>(list_.data)));
    }
  });
  if (outside < 0) any_outside_ = true;
}

void ChunkWork::run() {
  CpuWork::run([this] {
    check_pairs();
    const i64 num_pairs = args_.params.num_pairs;
    for (block_begin_ = 0; block_begin_ < num_pairs; block_begin_ += kBlockPairs) {
      const i64 count = std::min(kBlockPairs, num_pairs - block_begin_);
      pairs_ = {staging_.uploads.take(PairList::bytes(count, shape_.index_bytes)),
                shape_.index_bytes};
      move_block(count);
    }
    finish();
    turn_.finish();
  });
}

void ChunkWork::move_part(i64 part) {
  const i64 number = part / shape_.num_parts() % kNumChunks;
  InWork& work = in_work_[number];
  const i64 begin = part % shape_.num_parts() * shape_.part_rows;
  move_rows(number, work, begin, std::min(work.count, begin + shape_.part_rows));
  work.num_left.fetch_sub(1);
}

ChunkShape::ChunkShape(const PairArgs& args, int index_bytes)
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
  chunk_rows = (kChunkBytes - kHostLineBytes) / (row_bytes + (has_slot_map ? 3 : 2) * index_bytes);
  if (chunk_rows > part_rows) chunk_rows = chunk_rows / part_rows * part_rows;
}

}  // namespace jitkern
