// swap_rows on the device: a slot's old row goes to pinned host memory while its new one comes.
//
// Over PCIe both directions at once are worth twice one, if reads do not wait for writes: a lane
// has the new vectors and the old ones of kInFlight chunks on their way before it stores the first.
// Rows of 656 bytes, both directions together, on an H200 (PCIe Gen5) whose copy engines move 100.8
// GB/s: two rows under way in a warp 76.0, one 68, four, which spill, 55; by cp.async 56; two
// kernels one after the other 57.
#include <jitkern/copy.cuh>

#include "swap.h"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight>
struct SwapRows {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  static_assert(kRowBytes < (1 << 30), "a row of less than 1 GiB");
  static_assert(kThreads % 32 == 0, "whole warps, which take batches");
  using Params = SwapParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;
  static constexpr i64 kWindow = window_bytes(kRowBytes, kVecBytes, kLineAligned);
  using Rows = Group<kWindow, kVecBytes, swap_in_flight(kWindow, kVecBytes, kInFlight)>;

  static __device__ void run(const Params& p) {
    if constexpr (kLarge) {
      swap_batches(p);
    } else {
      swap_rows(p, Rows(thread_number()));  // the launch has a thread for each share
    }
  }

 private:
  // A lead that puts every offset behind the row: nothing of it is copied.
  static constexpr i32 kNoRow = -(1 << 30);
  // Whether one warp has all of a row. Then each host row is begun at its own line, and what one
  // lane reads of a slot another may overwrite; else every lane keeps to the same bytes.
  static constexpr bool kOwnLeads = !kLineAligned && Rows::kShape.splits == 1;

  struct Triple {
    i64 fetch;
    i64 slot;
    i64 back;

    __device__ bool is_padding() const { return slot < 0; }
    __device__ bool is_inside(const Params& p) const {
      return slot >= 0 && slot < p.num_slots && fetch < p.num_host_rows && back < p.num_host_rows;
    }
  };

  static __device__ Triple read_triple(const Params& p, i64 number) {
    if (number >= p.num_triples) return {-1, -1, -1};
    const Int* triple = static_cast<const Int*>(p.triples) + 3 * number;
    return {triple[0], triple[1], triple[2]};
  }

  // Bytes of a neighbour in front of a host row, in its first line.
  static __device__ i32 lead_of(const char* row) {
    return kLineAligned ? 0 : static_cast<i32>(reinterpret_cast<u64>(row) % kHostLineBytes);
  }

  // A batch is what a warp takes at a time; 2^32 of them would be terabytes.
  static __device__ void swap_batches(const Params& p) {
    const u32 num_batches = static_cast<u32>((Rows::kShape.num_threads(p.num_triples) + 31) / 32);
    const u32 num_warps = gridDim.x * (blockDim.x / 32);
    for (u32 batch = static_cast<u32>(thread_number() / 32); batch < num_batches;
         batch += num_warps) {
      swap_rows(p, Rows(i64(batch) * 32 + threadIdx.x % 32));
    }
  }

  // Straight-line loops, one for each step: a branch between two loads would make the second wait
  // for the first.
  static __device__ void swap_rows(const Params& p, const Rows group) {
    char* slot[Rows::kRows];
    const char* source[Rows::kRows];
    char* target[Rows::kRows];
    i32 fetch_lead[Rows::kRows];
    i32 back_lead[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const Triple triple = read_triple(p, group.first_row + r);
      const bool inside = triple.is_inside(p);
      const bool fetches = inside && triple.fetch >= 0;
      const bool writes_back = inside && triple.back >= 0;
      slot[r] = p.gpu + (inside ? triple.slot * p.gpu_stride_bytes : 0);
      source[r] = p.host + (fetches ? triple.fetch * p.host_stride_bytes : 0);
      target[r] = p.host + (writes_back ? triple.back * p.host_stride_bytes : 0);
      const char* begun = kOwnLeads || !fetches ? target[r] : source[r];
      fetch_lead[r] = fetches ? lead_of(source[r]) : kNoRow;
      back_lead[r] = writes_back ? lead_of(begun) : kNoRow;
    }
    Vec<kVecBytes> fetched[Rows::kRows][Rows::kChunks];
    Vec<kVecBytes> old[Rows::kRows][Rows::kChunks];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - fetch_lead[r];
        if (offset >= 0 && offset < kRowBytes) {
          fetched[r][c] = load_vec<kVecBytes>(source[r] + offset);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - back_lead[r];
        if (offset >= 0 && offset < kRowBytes) {
          old[r][c] = load_vec<kVecBytes>(slot[r] + offset);
        }
      }
    }
    if constexpr (kOwnLeads) __syncwarp();
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - back_lead[r];
        if (offset >= 0 && offset < kRowBytes) {
          store_vec<kVecBytes>(target[r] + offset, old[r][c]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < Rows::kChunks; ++c) {
        const i32 offset = group.offset(c) - fetch_lead[r];
        if (offset >= 0 && offset < kRowBytes) {
          store_vec<kVecBytes>(slot[r] + offset, fetched[r][c]);
        }
      }
    }
    if (!group.reports()) return;
#pragma unroll 1
    for (int r = 0; r < Rows::kRows; ++r) report(p, group.first_row + r);
  }

  // Once for each triple: its fault. Reads the triple again (from L1), for which no register was
  // kept while the row was in flight.
  static __device__ void report(const Params& p, i64 number) {
    const Triple triple = read_triple(p, number);
    if (triple.is_padding() || triple.is_inside(p)) return;
    if (triple.fetch >= p.num_host_rows) {
      report_fault(p.fault, p.fetch_site, number, triple.fetch, p.num_host_rows);
    } else if (triple.slot >= p.num_slots) {
      report_fault(p.fault, p.slot_site, number, triple.slot, p.num_slots);
    } else {
      report_fault(p.fault, p.back_site, number, triple.back, p.num_host_rows);
    }
  }
};

}  // namespace jitkern
