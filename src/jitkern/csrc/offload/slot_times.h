// How long the iterations of a SlotPipeline take, from events that are read when they are over.
#pragma once

#include <jitkern/launch.h>

#include <deque>
#include <mutex>
#include <vector>

namespace jitkern {

// What is done to a slot. An iteration of a run is a load and a compute, a compute and a store, or
// all three.
enum SlotAccess : int { kNoAccess = -1, kLoad, kCompute, kStore };
constexpr int kNumAccesses = 3;

// Nothing here waits. One iteration in `every` is timed, in bursts: to know what an iteration
// waited for takes the times of the one before it, and of the last store of its slot. Without these
// there is no row.
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
  };

  // Without a device the times are the host's. At most `capacity` iterations wait for their
  // harvest; then the oldest are dropped.
  SlotTimes(bool on_gpu, i64 capacity, i64 every);
  ~SlotTimes();
  SlotTimes(const SlotTimes&) = delete;
  SlotTimes& operator=(const SlotTimes&) = delete;

  // By the pipeline's thread. A session begins; and a run, whose iterations go from the first
  // access to the last one.
  void begin_session() { is_first_ = true; }
  void begin_run(int first, int last) { first_access_ = first, last_access_ = last; }
  // Around what is queued on a stream for an access of a slot.
  void begin(int access, size_t slot, CUstream stream);
  void end(int access, size_t slot, CUstream stream);

  // By any thread: reads up to `max_rows` iterations that are over, and returns how many. Writes a
  // row for each whose times are all known.
  i64 harvest(double* rows, i64 max_rows, double* summary);

 private:
  // A place in the work of a stream; on the CPU a time.
  struct Moment {
    CUevent event = nullptr;  // made when it is first recorded
    double ms = 0;            // of an event: once it has been read
  };
  struct Iteration {
    u64 number;  // from 1 on
    u64 stored_by;
    size_t slot;
    bool is_first;  // of a session: what its compute waits for is the fill
    std::array<bool, kNumAccesses> has;
    std::array<Moment, kNumAccesses> begin, end;
  };
  struct Slot {
    u64 number = 0;     // of its last iteration
    u64 stored_by = 0;  // the last iteration that stored it
    Iteration* timed = nullptr;
  };
  struct Store {  // whose times were read
    u64 number = 0;
    double end_ms = 0;
  };

  bool is_due(u64 number) const;
  void mark(Moment& moment, CUstream stream);
  bool follows(const Iteration& iteration) const {
    return base_ != nullptr && !iteration.is_first && iteration.number == base_->number + 1;
  }
  void read(Iteration& iteration);
  bool write(const Iteration& iteration, double* row);

  const bool on_gpu_;
  const i64 capacity_;
  const u64 every_;
  const double origin_ms_;  // on the CPU
  // Of the pipeline's thread.
  std::vector<Slot> slots_;
  u64 num_begun_ = 0;
  bool is_first_ = false;
  int first_access_ = kLoad, last_access_ = kCompute;

  std::mutex mutex_;  // of the rest
  std::deque<Iteration> all_;
  std::vector<Iteration*> free_;
  std::deque<Iteration*> queue_;
  Iteration* base_ = nullptr;  // the last that was read
  i64 num_iterations_ = 0, num_transfers_ = 0, num_dropped_ = 0;
  double load_end_ms_ = 0, store_end_ms_ = 0, last_fill_ms_;
  std::vector<Store> stored_;  // the last of each slot
};

}  // namespace jitkern
