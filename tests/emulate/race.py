"""Kernels that read an index again once they have compared it."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("race")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/store.cu",
        (
            "slot read again",
            "slot[r] * copy.cache_stride_bytes",
            "i64(indices[group.first_row + r]) * copy.cache_stride_bytes",
        ),
    ),
    *mutants_of(
        SWEEP,
        "ops/pairs.cuh",
        (
            "pair not compared again",
            "if (!pair.is_inside(p)) {",
            "if (false) {",
        ),
    ),
    *mutants_of(
        SWEEP,
        "ops/sort.cuh",
        (
            "slot map read again",
            "if (slot >= 0) return {kCopy, slot, dst_row, src_row};",
            "const volatile Int* again = pairs + 2 * number;\n"
            "if (slot >= 0) return {kCopy, slot, dst_row, *again};",
        ),
    ),
]
