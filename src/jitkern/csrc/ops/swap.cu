// swap_rows on the device: a slot's old row goes to pinned host memory while its new row arrives.
// For a large pool the same kernel makes the sorted moves, with the new rows going to a buffer,
// from which H2DGather copies them to their slots.
//
// PCIe moves twice as much in both directions at once, if reads do not wait for writes: a lane
// loads the new and the old vectors of kInFlight chunks before it stores the first. GB/s for rows
// of 656 bytes, both directions together, on an H200 (copy engines 100.8): two rows in flight in a
// warp 76.0, one 68, four, which spill, 55; cp.async 56; two kernels one after the other 57.
#include "pairs.cuh"
#include "sort.cuh"

namespace jitkern {

template <i64 kRowBytes, int kThreads, int kMaxOccupancy, int kVecBytes, int kIndexBytes,
          bool kLineAligned, bool kLarge, int kInFlight, bool kStaged = false>
struct SwapRows {
  static_assert(kRowBytes % kVecBytes == 0, "a row is a whole number of vectors");
  static_assert(kRowBytes < (1 << 30), "a row of less than 1 GiB");
  static_assert(kThreads % 32 == 0, "whole warps, which take batches");
  using Params = SwapParams;
  static constexpr int kNumThreads = kThreads, kMinBlocks = kMaxOccupancy;
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
  // Whether one warp copies all of a row. Then each host row starts at its own line, and a lane may
  // overwrite bytes of a slot that another lane reads. Otherwise a lane reads and writes the same
  // bytes. With staging nothing is overwritten.
  static constexpr bool kOneWarp = !kLineAligned && Rows::kShape.splits == 1;
  static constexpr bool kOwnLeads = kOneWarp || kStaged;

  // Bytes of a neighbour before a host row, in its first line.
  static __device__ i32 lead_of(const char* row) {
    return kLineAligned ? 0 : static_cast<i32>(reinterpret_cast<u64>(row) % kHostLineBytes);
  }

  // An unsorted call has equal shares, as a register for the next batch's number would spill.
  static __device__ void swap_batches(const Params& p) {
    if constexpr (kStaged) {
      for_batches<Rows>(p.num_triples, p.last_batch,
                        [&p](const Rows group) { swap_rows(p, group); });
    } else {
      const u32 num_batches = static_cast<u32>((Rows::kShape.num_threads(p.num_triples) + 31) / 32);
      const u32 num_warps = gridDim.x * (blockDim.x / 32);
      for (u32 batch = static_cast<u32>(thread_number() / 32); batch < num_batches;
           batch += num_warps) {
        swap_rows(p, Rows(i64(batch) * 32 + threadIdx.x % 32));
      }
    }
  }

  // One loop for each step: after a branch between two loads the second waits for the first.
  static __device__ void swap_rows(const Params& p, const Rows group) {
    char* slot[Rows::kRows];
    const char* source[Rows::kRows];
    char* target[Rows::kRows];
    i32 fetch_lead[Rows::kRows];
    i32 back_lead[Rows::kRows];
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      const SwapTriple triple = read_triple<kIndexBytes>(p, group.first_row + r);
      // Moves are inside. A move that only fetches has no slot and touches none.
      const bool inside = kStaged || triple.is_inside(p);
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
    for_vectors<kRowBytes>(group, fetch_lead, [&](int r, int c, i32 offset) {
      fetched[r][c] = load_vec<kVecBytes>(source[r] + offset);
    });
    for_vectors<kRowBytes>(group, back_lead, [&](int r, int c, i32 offset) {
      old[r][c] = load_vec<kVecBytes>(slot[r] + offset);
    });
    if constexpr (kOneWarp && !kStaged) __syncwarp();
    for_vectors<kRowBytes>(group, back_lead, [&](int r, int c, i32 offset) {
      store_vec<kVecBytes>(target[r] + offset, old[r][c]);
    });
    for_vectors<kRowBytes>(group, fetch_lead, [&](int r, int c, i32 offset) {
      char* const taker = kStaged ? p.staging + (group.first_row + r) * kRowBytes : slot[r];
      store_vec<kVecBytes>(taker + offset, fetched[r][c]);
    });
    if constexpr (kStaged) return;
    if (!group.reports()) return;
    // Triples are read again, from L1, to save registers while the rows are in flight.
#pragma unroll 1
    for (int r = 0; r < Rows::kRows; ++r) {
      const i64 number = group.first_row + r;
      report_triple(p, read_triple<kIndexBytes>(p, number), number);
    }
  }
};

}  // namespace jitkern
