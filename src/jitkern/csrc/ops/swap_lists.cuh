// Taking the triples of a large call apart into moves, in the order of the host's memory.
#pragma once

#include "regions.cuh"
#include "swap.cuh"

namespace jitkern {

// Numbers each triple's rows in their regions.
template <int kIndexBytes, int kThreads, int kMaxOccupancy>
struct ListTriples {
  using Params = SwapListParams;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    if (number >= p.num_triples) return;
    const SwapTriple triple = read_triple<kIndexBytes>(p, number);
    report_triple(p, triple, number);
    const bool inside = triple.is_inside(p);
    const bool exchanges = inside && triple.fetch >= 0 && triple.fetch == triple.back;
    u32 fetch_rank = kNotListed;
    u32 back_rank = exchanges ? kExchanged : kNotListed;
    if (inside && triple.fetch >= 0) {
      fetch_rank = rank_of(p, exchanges ? kExchanges : kFetches, triple.fetch);
    }
    if (inside && triple.back >= 0 && !exchanges) back_rank = rank_of(p, kBacks, triple.back);
    p.ranks[2 * number] = fetch_rank;
    p.ranks[2 * number + 1] = back_rank;
  }

 private:
  static __device__ u32 rank_of(const Params& p, MoveKind kind, i64 row) {
    return take_rank(p.regions, region_of(p.regions, row * p.host_stride_bytes), kind);
  }
};

// Writes each row to its move: exchanges, then rows to fetch beside rows to write back to.
template <int kIndexBytes, int kThreads, int kMaxOccupancy>
struct PlaceTriples {
  using Params = SwapListParams;
  using Int = Index<kIndexBytes>;
  static constexpr int kNumThreads = kThreads;
  static constexpr int kMinBlocks = kMaxOccupancy;

  static __device__ void run(const Params& p) {
    const i64 number = thread_number();
    if (number >= p.num_triples) return;
    const u32 fetch_rank = p.ranks[2 * number];
    const u32 back_rank = p.ranks[2 * number + 1];
    const SwapTriple triple = read_triple<kIndexBytes>(p, number);
    if (!triple.is_inside(p)) return;  // compared again: it may have changed since `list` read it
    Int* const moves = static_cast<Int*>(p.moves);
    Int* const places = static_cast<Int*>(p.places);
    const Int slot = static_cast<Int>(triple.slot);
    if (fetch_rank != kNotListed) {
      const bool exchanges = back_rank == kExchanged;
      const i64 move = place_of(p, exchanges ? kExchanges : kFetches, triple.fetch, fetch_rank);
      if (move >= 0) {
        moves[3 * move] = static_cast<Int>(triple.fetch);
        if (exchanges) {
          moves[3 * move + 1] = slot;
          moves[3 * move + 2] = static_cast<Int>(triple.fetch);
        }
        places[2 * move] = static_cast<Int>(move);
        places[2 * move + 1] = slot;
      }
    }
    if (back_rank >= kExchanged) return;
    const i64 move = place_of(p, kBacks, triple.back, back_rank);
    if (move < 0) return;
    moves[3 * move + 1] = slot;
    moves[3 * move + 2] = static_cast<Int>(triple.back);
  }

 private:
  // The number of its move; -1 where the triple has changed so that there is none.
  static __device__ i64 place_of(const Params& p, MoveKind kind, i64 row, u32 rank) {
    const u64 region = region_of(p.regions, row * p.host_stride_bytes);
    if (region >= kNumRegions) return -1;
    const u32* const starts = p.regions.starts;
    i64 place = i64(starts[kind * kNumRegions + region]) + rank;
    if (kind == kBacks) {  // begin where fetches do
      place -= starts[kBacks * kNumRegions] - starts[kFetches * kNumRegions];
    }
    return place < p.num_triples ? place : -1;
  }
};

}  // namespace jitkern
