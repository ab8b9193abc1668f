"""The indexing kernel made wrong, and which indices are rows of a table."""

from __future__ import annotations

from emulate import index_table
from emulate.mutant import ALL_CHUNKS, ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("index", ROWS)
# Which indices are rows of a table: as a call reads rows, and as pairs of them.
_RANGES = (
    ("bound off by one", "row < u64(p.vocab_length)", "row <= u64(p.vocab_length)"),
    ("start of the range ignored", " - u64(p.vocab_start)", ""),
    ("start of the second range ignored", " - u64(p.added_start)", ""),
    ("second bound off by one", "added < u64(p.added_length)", "added <= u64(p.added_length)"),
    ("second range not behind the first", "p.added_row + i64(added)", "i64(added)"),
    ("second range only", "row < u64(p.vocab_length) ? i64(row) : other", "other"),
    (
        "padding read",
        "u64(index) - u64(p.vocab",
        "u64(index < 0 ? -1 - index : index) - u64(p.vocab",
    ),
    (
        "padding in the second range",
        "p.added_row + i64(added) : -1",
        "p.added_row + i64(added) : 0",
    ),
)
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/index.cu",
        ("padding read", "bool inside = row >= 0", "bool inside = row >= -1", 0, 2),
        ("row behind the last", "row < p.num_rows ? i64", "row <= p.num_rows ? i64"),
        (
            "missing tail",
            "row < p.num_rows && group.offset(c)",
            "row < p.num_rows && kVecBytes + group.offset(c)",
        ),
        ("wrong stride", "row * p.weights_stride_bytes", "row * p.output_stride_bytes"),
        (
            "not zeroed",
            "value[r][c] = Vec<kVecBytes>{};",
            "if (inside) value[r][c] = Vec<kVecBytes>{};",
        ),
        ("rows swapped", "char* target = p.output + row", "char* target = p.output + (row ^ 1)"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x == 7) continue;", 1, 2),
        ("fault for the last row", "if (index[r] <= p.last_index)", "if (index[r] < p.last_index)"),
    ),
    *mutants_of(SWEEP, "ops/index.h", *_RANGES),
    *mutants_of(index_table.SWEEP, "ops/index.h", *_RANGES),
]
