"""The lists of large calls on pairs made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("pair_lists")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/sort.cuh",
        ("barrier forgotten", "__syncthreads();", "", 3, 5),
        ("lists overlap", "place += block_starts[found.list];", ""),
        ("first place lost", "block_counts[threadIdx.x]) + 1u;", "block_counts[threadIdx.x]);"),
        ("fetched twice", "[2 * i64(owner)] == src_row) return owner;", "[0] < 0) return owner;"),
        ("copied from another row", "pairs[2 * i64(owner) + 1]", "pairs[2 * i64(owner)]"),
        ("known row ignored", "if (slot >= 0) return", "if (slot > 0) return"),
        ("slot bound off by one", "slot >= p.num_dst_rows", "slot > p.num_dst_rows"),
        ("search behind the table", "(place + 1) & p.table_mask", "place + 1"),
        ("region not compared", "if (region >= kNumRegions) return -1;", ""),
        ("place not compared", "return place < num ? place : -1;", "return place;"),
        ("regions of the other side", "kHostSide == kHostSource ?", "kHostSide != kHostSource ?"),
        ("padding fetched", "if (rank == kNotListed) return;", ""),
        (
            "all at the region's start",
            "+ region]) + rank",
            "+ region])",
        ),
        ("first of a region lost", "+ region], 1u) + 1u;", "+ region], 1u);"),
        ("second of four", "start + last.x + 1u", "start + last.x"),
        ("fourth of four", "third + last.z + 1u", "third"),
        ("other warps", "for (int w = 0; w < warp; ++w) start += warp_sums[w];", ""),
        ("lane counted twice", "start += sum - count;", "start += sum;"),
        ("no count of the fetches", "*p.last_entry = start - 1u", "*p.last_entry = start"),
    ),
]
