"""The store kernel made wrong, and what it shares with other kernels."""

from __future__ import annotations

from emulate.mutant import ALL_CHUNKS, ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("store", ROWS)
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/store.cu",
        ("bound off by one", "slot[r] < p.num_slots;", "slot[r] <= p.num_slots;"),
        ("padding written", "slot[r] >= 0 && slot[r] <", "slot[r] <"),
        ("row behind the last", "row < p.num_rows && group", "row <= p.num_rows && group"),
        (
            "missing tail",
            "if (inside && group.offset(c) <",
            "if (inside && kVecBytes + group.offset(c) <",
        ),
        ("end of row ignored", "inside && group.offset(c) < kBytes", "inside"),
        ("wrong stride", "slot[r] * copy.cache_stride_bytes", "slot[r] * copy.row_stride_bytes"),
        ("K and V swapped", "= copy.rows + row", "= p.copies[1 - blockIdx.y].rows + row"),
        ("V forgotten", "p.copies[blockIdx.y]", "p.copies[0]"),
        ("K as long as V", "copy_rows<kFirstRowBytes>(p", "copy_rows<kRowBytes>(p"),
        ("V as short as K", "copy_rows<kRowBytes>(p", "copy_rows<kFirstRowBytes>(p", 1, 2),
        ("V starts with K", "p.copies[1], p.first_blocks", "p.copies[1], 0"),
        ("V in the place of K", "p, p.copies[0]", "p, p.copies[1]"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x % 32 == 31) continue;", 1, 2),
        ("wrong position", "group.first_row + r, slot[r]", "group.first_row, slot[r]"),
        ("fault forgotten", "fault |= slot[r] >= p.num_slots;", ""),
    ),
    *mutants_of(
        SWEEP,
        "include/jitkern/copy.cuh",
        ("split forgotten", "group % kShape.splits", "group * 0"),
        ("rows overlap", "kShape.splits * kRows", "kShape.splits"),
        ("chunks overlap", "chunk * (kShape.lanes * kVecBytes)", "chunk * kVecBytes"),
    ),
    *mutants_of(
        SWEEP,
        "include/jitkern/copy.cuh",
        (
            "first fault overwritten",
            "seen->state != 0 || atomicCAS(&record->state, 0u, 1u) != 0u",
            "false",
        ),
        ("never complete", "seen->state = 2;", ""),
        ("no bound", "seen->bound = bound;", ""),
    ),
]
