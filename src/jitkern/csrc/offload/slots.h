// Which stream may use a slot of a SlotPipeline when, and how long each use took.
#pragma once

#include <jitkern/launch.h>
#include <sys/types.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace jitkern {

// What is done to a slot. An iteration of a run is a load and a compute, a compute and a store, or
// all three.
enum SlotAccess : int { kNoAccess = -1, kLoad, kCompute, kStore };
constexpr int kNumAccesses = 3;

// A place in the work of a stream; on the CPU a time.
struct Moment {
  CUevent event = nullptr;  // made when it is first recorded
  double ms = 0;            // of an event: once it is harvested
};

// One iteration of a slot: where its accesses begin and end. Without times only ends are recorded,
// by events that are five times as cheap.
struct Marks {
  bool is_timed = false;
  bool is_first = false;  // of a session: what its compute waits for is the fill
  unsigned seen = 0;      // a bit for each access
  int last = kNoAccess;
  int slot = 0;
  int refs = 0;  // of the slot, and of the queue or the base of times
  u64 run = 0;
  u64 number = 0;        // among those that were begun, from 1 on
  u64 stored_by = 0;     // the iteration that has stored the slot just before; 0: none
  double waited_ms = 0;  // on the CPU: the end of the transfer before the compute
  std::array<Moment, kNumAccesses> begin;
  std::array<Moment, kNumAccesses> end;
  bool has(int access) const { return (seen >> access & 1) != 0; }
  int num_transfers() const { return (has(kLoad) ? 1 : 0) + (has(kStore) ? 1 : 0); }
};

// The times of iterations that are over, read in order and never waited for; by any thread. They
// come in bursts. An iteration waited for the compute before it and the last transfer of its slot:
// if one of these has no times there is no row, and it is only the base of the next one.
class SlotTimes {
 public:
  // What a row of `harvest` holds, in milliseconds; NaN: there is none.
  enum Column {
    kLoadBegin,  // since the first iteration, on the CPU since the pipeline was made; five more
    kLoadEnd,
    kComputeBegin,
    kComputeEnd,
    kStoreBegin,
    kStoreEnd,
    kComputeMs,
    kTransferMs,  // of the direction that took longer
    kStallMs,     // that the compute waited for a transfer
    kFillMs,      // before the first compute of a session; negative in the others
    kLoadLinkMs,  // by which the load kept the link busy longer; and so on
    kComputeLinkMs,
    kStoreLinkMs,
    kTransfers,  // how many there were: 1 or 2
    kNumColumns,
  };
  // What else `harvest` tells.
  enum Summary {
    kRows,        // that it wrote
    kIterations,  // that were queued, with and without times; and their transfers
    kAllTransfers,
    kDropped,
    kLastFillMs,  // NaN: none yet
    kNumSummaries,
  };

  // At most `capacity` iterations wait for their harvest; then the oldest are dropped.
  SlotTimes(bool on_gpu, i64 capacity);
  ~SlotTimes();

  // Marks for the next iteration of a slot that has had `old`.
  Marks* take(Marks* old);
  // All accesses of the iteration are queued.
  void push(Marks* marks);
  // Reads up to `max_rows` iterations that are over; returns how many. Writes a row for each whose
  // times are all known.
  i64 harvest(double* rows, i64 max_rows, double* summary);
  // A slot has no more use for them.
  void give_back(Marks* marks);
  // In a forked child, which must not ask the driver.
  void forget_events();

 private:
  // A store whose times were read.
  struct Stored {
    u64 number = 0;  // of the iteration
    double end_ms = 0;
  };
  bool follows(const Marks& marks) const {
    return base_ != nullptr && !marks.is_first && marks.number == base_->number + 1;
  }
  void read(Marks& marks);
  bool write(const Marks& marks, double* row);
  void release(Marks* marks) {
    if (--marks->refs == 0) free_.push_back(marks);
  }

  std::mutex mutex_;
  bool on_gpu_;
  i64 capacity_;
  i64 num_dropped_ = 0;
  i64 num_pushed_ = 0;
  i64 num_transfers_ = 0;
  double last_fill_ms_;
  std::vector<std::unique_ptr<Marks>> all_;
  std::vector<Marks*> free_;
  std::deque<Marks*> queue_;
  Marks* base_ =
      nullptr;  // the last that was harvested: times are read from the end of its compute
  double load_end_ms_ = 0;
  double store_end_ms_ = 0;
  std::vector<Stored> stored_;  // the last of each slot
};

// Streams of one pipeline: one for compute, some for each direction. One thread at a time. On the
// CPU, `ordinal` -1, there are none, and `next` only takes times.
class SlotStreams {
 public:
  // One iteration in `every` is timed; at most `capacity` wait to be read, 0: none is timed.
  SlotStreams(int ordinal, CUstream compute, const std::vector<CUstream>& loads,
              const std::vector<CUstream>& stores, i64 capacity, i64 every);
  ~SlotStreams();
  SlotStreams(const SlotStreams&) = delete;
  SlotStreams& operator=(const SlotStreams&) = delete;

  // A slot whose memory the compute stream has allocated.
  void add_slot(i64 index);
  // Begins a session, after all work on the caller's stream; returns whether that is captured.
  bool enter(CUstream caller);
  // Begins a run whose iterations end with this access.
  void start(int final_access);
  // Ends the open access, and begins one unless it is kNoAccess.
  void next(int access, i64 index);
  // Later transfers wait for all work on the compute stream.
  void fork();
  // As of SlotTimes, by any thread.
  i64 harvest(double* rows, i64 max_rows, double* summary);
  // Ends the session: the caller's stream waits for all of it, even if a part of it failed.
  void leave();

  std::optional<SlotTimes> times;

 private:
  struct Lane {
    CUstream stream = nullptr;
    CUevent joined = nullptr;
    bool is_forked = false;
    bool is_used = false;
  };
  // The uses of a slot, each of which waits for the one before it. Captures have chains of their
  // own: what one records only the same capture can wait for.
  struct Chain {
    Marks own;
    Marks* marks = &own;
    Lane* lane = nullptr;  // of the last access; none yet
    CUevent ended = nullptr;
    u64 session = 0;
  };
  struct Slot {
    Chain eager;
    Chain captured;
  };
  struct Open {
    Chain* chain = nullptr;
    Lane* lane = nullptr;
    int access = kNoAccess;
  };

  Lane& lane_of(int access, i64 index);
  void use(Lane& lane);
  void begin(int access, i64 index);
  void end_open();
  Marks& marks_of(Chain& chain, int access, i64 index);
  bool is_due(u64 number) const;
  void mark(Moment& moment, const Lane& lane, bool is_timed);

  Device* device_;  // none on the CPU
  pid_t owner_;
  std::deque<Lane> lanes_;  // compute, loads, stores
  size_t num_loads_;
  std::deque<Slot> slots_;
  CUevent forked_ = nullptr;
  CUstream caller_ = nullptr;
  bool is_capturing_ = false;
  bool is_first_ = false;
  u64 session_ = 0;
  u64 run_ = 0;
  u64 every_;
  u64 num_begun_ = 0;  // iterations outside captures
  int final_access_ = kCompute;
  double origin_ms_;           // on the CPU
  double transferred_ms_ = 0;  // there: the end of the last transfer
  Open open_;
};

void destroy_event(CUevent event);

}  // namespace jitkern
