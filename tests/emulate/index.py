"""The indexing kernel made wrong."""

from __future__ import annotations

from emulate.mutant import ALL_CHUNKS, ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("index", ROWS)
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/index.cu",
        ("bound off by one", "row < u64(p.vocab_length)", "row <= u64(p.vocab_length)"),
        ("padding read", "u64(index[r]) - u64(p", "u64(index[r] < 0 ? 0 : index[r]) - u64(p"),
        ("row behind the last", "row < p.num_rows ? i64", "row <= p.num_rows ? i64"),
        (
            "missing tail",
            "row < p.num_rows && group.offset(c)",
            "row < p.num_rows && kVecBytes + group.offset(c)",
        ),
        ("wrong stride", "i64(row) * p.weights_stride_bytes", "i64(row) * p.output_stride_bytes"),
        ("start of the range ignored", " - u64(p.vocab_start)", ""),
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
