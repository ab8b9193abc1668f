"""The pairs of a table in host memory made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("index_table")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/index.cu",
        ("index behind the last", "number < p.num_rows;", "number <= p.num_rows;"),
        (
            "padding fetched",
            "inside ? static_cast<Int>(number) : Int(-1)",
            "static_cast<Int>(number)",
        ),
        ("zeros of the first only", "outside &= outside - 1", "outside = 0"),
        ("zeros of another row", "number - lane + (", "number + ("),
        ("zeros of part of a row", "at += 32 * kVecBytes", "at += 64 * kVecBytes"),
        ("zeros behind a row", "at < kRowBytes", "at <= kRowBytes"),
        ("wrong stride", "zero_row * p.output_stride_bytes", "zero_row * p.weights_stride_bytes"),
        ("fault for the last row", "index > p.last_index", "index >= p.last_index"),
    ),
]
