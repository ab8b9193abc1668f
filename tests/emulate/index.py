"""The indexing kernel made wrong."""

from __future__ import annotations

from emulate.mutant import ALL_CHUNKS, ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("index", ROWS)
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
]
