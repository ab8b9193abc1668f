// Pairs of a call in host memory, gone through by the CPU's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "host/staging.h"
#include "host/workers.h"
#include "pairs_by_cpu.h"

namespace jitkern {

// Pairs of the narrowest type that holds the numbers of their rows.
struct PairList {
  void* data;
  int index_bytes;

  static i64 bytes(i64 count, int index_bytes) { return 2 * count * index_bytes; }
  i64 bytes(i64 count) const { return bytes(count, index_bytes); }
  Pair at(i64 i) const {
    if (index_bytes == 4) {
      const int32_t* items = static_cast<const int32_t*>(data) + 2 * i;
      return Pair(i64(items[0]), i64(items[1]));
    }
    const int64_t* items = static_cast<const int64_t*>(data) + 2 * i;
    return Pair(i64(items[0]), i64(items[1]));
  }
  void set(i64 i, i64 src_row, i64 dst_row) const {
    set_item(2 * i, src_row);
    set_item(2 * i + 1, dst_row);
  }
  void set_item(i64 i, i64 value) const {
    if (index_bytes == 4) {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    } else {
      static_cast<int64_t*>(data)[i] = value;
    }
  }
};

// The bytes of an index that holds the call's row numbers.
inline int narrow_index_bytes(const PairArgs& args) {
  const i64 most = std::max(args.src.num_rows, args.dst.num_rows);
  return most <= std::numeric_limits<int32_t>::max() ? 4 : 8;
}

// The pairs of one block of a call: so many that their copy fits the pinned memory for it.
constexpr i64 kBlockPairs = i64(512) << 10;

// A call's work on the CPU in parts that threads share: for each block of pairs first those that
// check and copy the pairs, then those that move rows, which become known as the GPU gets on.
class CpuWork {
 public:
  // `bytes` are what the threads go through, by which fewer of them may do.
  CpuWork(const PairArgs& args, i64 num_threads, i64 bytes)
      : args_(args), num_threads_(num_threads), bytes_(bytes) {}
  virtual ~CpuWork() = default;

  // Calls lead() while other threads do parts. To be called once.
  void run(const std::function<void()>& lead);

  // IndexError for the first pair that is out of range. Of a call of one block that is left to
  // finish_copy().
  void check_pairs();

  // Has pairs [begin, begin + count) copied to `list`; what is out of range becomes padding.
  void start_copy(const PairList& list, i64 begin, i64 count);
  // Helps until they are. IndexError as check_pairs() where the block is all of the call.
  void finish_copy();

 protected:
  // Part `number` of the block's rows.
  virtual void move_part(i64) {}

  // Parts up to `count` are there.
  void publish_moves(i64 count) { publish(first_move_ + count); }
  i64 num_threads() const { return num_threads_; }
  // Does one part, if there is one that nobody does.
  bool help();

  const PairArgs& args_;
  i64 block_begin_ = 0;  // the number of its first pair

 private:
  void publish(i64 count);
  void do_part(i64 number);
  // Pairs [begin, end); copies them from item `to` of the list on, if there is one.
  void check_part(i64 begin, i64 end, const i64* to);

  const i64 num_threads_;
  const i64 bytes_;
  Parts parts_;
  Workers* workers_ = nullptr;       // of run()
  std::atomic<i64> num_checked_{0};  // parts
  std::atomic<bool> any_outside_{false};
  // Of the block; written before its parts are published.
  i64 first_check_ = 0;
  i64 first_move_ = 0;
  i64 block_end_ = 0;
  PairList list_{};
};

// How rows are staged in a chunk: pairs of the device's copy, for each a row of the slot map if
// there is one, then rows, one behind the other.
struct ChunkShape {
  i64 row_bytes;
  i64 part_rows;  // that one thread moves at a time
  i64 chunk_rows;
  int index_bytes;
  bool has_slot_map;

  // ValueError for rows that no chunk holds.
  ChunkShape(const PairArgs& args, int index_bytes);

  i64 num_parts() const { return ceil_div(chunk_rows, part_rows); }
  i64 slot_rows_at(i64 count) const { return 2 * count * index_bytes; }
  i64 rows_at(i64 count) const {
    const i64 bytes = slot_rows_at(count) + (has_slot_map ? count * index_bytes : 0);
    return ceil_div(bytes, kHostLineBytes) * kHostLineBytes;
  }
  i64 bytes(i64 count) const { return rows_at(count) + count * row_bytes; }
};

// A call's work where rows go through chunks, which threads fill or empty part by part.
class ChunkWork : public CpuWork {
 public:
  ChunkWork(const LaunchScope& scope, const PairArgs& args, i64 num_threads)
      : CpuWork(args, num_threads, args.bytes()),
        scope_(scope),
        shape_(args, narrow_index_bytes(args)),
        staging_(Staging::get(scope)),
        turn_(staging_, scope.stream()),
        chunks_(staging_.chunks()) {}

  void run();

 protected:
  // The rows that a chunk is for.
  struct InWork {
    i64 first;
    i64 count;
    std::atomic<i64> num_left;  // parts that no thread has done
  };

  // Moves the block's rows, of which pairs_ will hold so many; leads the threads.
  virtual void move_block(i64 count) = 0;
  // The last block is on its way.
  virtual void finish() {}
  // Rows [begin, end) of those that chunk `number` is for.
  virtual void move_rows(i64 number, const InWork& work, i64 begin, i64 end) = 0;

  // Begins with the block's pairs.
  void start_pairs(i64 count) { start_copy(pairs_, block_begin_, count); }

  const LaunchScope& scope_;
  const ChunkShape shape_;
  Staging& staging_;
  Staging::Turn turn_;
  Chunk* const chunks_;
  PairList pairs_{};  // of the block
  std::array<InWork, kNumChunks> in_work_{};

 private:
  void move_part(i64 part) final;
};

// Asks for a row that a thread will copy soon.
inline void prefetch_row(const char* row, i64 row_bytes) {
  constexpr i64 kMostBytes = 1024;  // the processor sees by itself what follows
  for (i64 at = 0; at < std::min(row_bytes, kMostBytes); at += 64) __builtin_prefetch(row + at);
}
constexpr i64 kStagedRowsAhead = 8;

}  // namespace jitkern
