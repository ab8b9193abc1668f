"""Which rows are each rank's in peer_gather and peer_scatter, made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("peer_lists")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "comm/peer_lists.cu",
        ("whoever comes first", "atomicMin(&p.table[place], static_cast<u32>(number));", ""),
        ("counted twice", "if (owner == number) {\n      take", "if (true) {\n      take"),
        ("region not compared", "if (region >= kNumRegions) return -1;", ""),
        ("slot not compared", "if (slot < 0 || slot >= p.num_pairs) return -1;", ""),
        (
            "first of a region lost",
            "atomicAdd(&p.cursors[region], 1u) + 1u",
            "atomicAdd(&p.cursors[region], 1u)",
        ),
        ("a part from the front of all", "i64(start) - part_start", "i64(start)"),
        ("from the next region on", "p.regions.starts[low + step] <= position", "true"),
        (
            "every rank fetches all",
            "position * p.num_ranks / total != p.rank",
            "false",
        ),
        ("last is not told", "if (last_fetch >= 0) atomicMax", "if (false) atomicMax"),
        ("first copy lost", "atomicAdd(&p.last_entries[1], num_copies) + 1u", "0"),
        ("copied from another row", "pairs[2 * owner + 1]", "pairs[2 * owner]"),
        ("barrier forgotten", "__syncthreads();", "", 1, 3),
        ("padding fetched", "&& p.places[number] != kNotListed", ""),
    ),
    *mutants_of(
        SWEEP,
        "comm/peer_copy.cu",
        ("copies though ranks are missing", "if (load_fresh(p.intact) == kUnwritten) ", ""),
    ),
    *mutants_of(
        SWEEP,
        "ops/pairs.cuh",
        ("to one rank alone", "t < p.num_shifts", "t < 1"),
        ("to one rank again and again", "to[r] + shift + step", "to[r] + step"),
    ),
]
