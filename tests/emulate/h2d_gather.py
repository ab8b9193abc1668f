"""The large calls of h2d_gather made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("h2d_gather")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/h2d_gather.cu",
        ("barrier forgotten", "__syncthreads();", "", 1, 3),
        ("lists overlap", "place += block_starts[found.list];", ""),
        ("first place lost", "block_counts[threadIdx.x]) + 1u;", "block_counts[threadIdx.x]);"),
        ("fetched twice", "if (pairs[2 * i64(owner)] == src_row) return owner;", ""),
        ("copied from another row", "pairs[2 * i64(owner) + 1]", "pairs[2 * i64(owner)]"),
        ("known row ignored", "if (slot >= 0) return", "if (slot > 0) return"),
        ("slot bound off by one", "slot >= p.num_dst_rows", "slot > p.num_dst_rows"),
        ("search behind the table", "(place + 1) & p.table_mask", "place + 1"),
    ),
]
