"""The copies of pairs made wrong."""

from __future__ import annotations

from emulate.mutant import ALL_CHUNKS, ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("pair_copy", ROWS)
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/pairs.cuh",
        ("source bound off by one", "src_row < p.num_src_rows &&", "src_row <= p.num_src_rows &&"),
        ("target bound off by one", "dst_row < p.num_dst_rows;", "dst_row <= p.num_dst_rows;"),
        ("padding copied", "!is_padding() && src_row", "src_row"),
        ("neighbour copied", "offset >= 0 && offset < kRowBytes", "offset < kRowBytes"),
        ("missing tail", "offset < kRowBytes", "offset + 16 < kRowBytes"),
        ("wrong stride", "pair.dst_row * p.dst_stride_bytes", "pair.dst_row * p.src_stride_bytes"),
        ("swapped pair", "return {pair[0], pair[1]};", "return {pair[1], pair[0]};"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x == 31) continue;", 0, 2),
        ("count off by one", "*p.last_pair + 1u", "*p.last_pair"),
        (
            "slot map of a fault",
            "p.num_src_rows : p.num_dst_rows);\n      return;",
            "p.num_src_rows : p.num_dst_rows);",
        ),
        ("slot map of nobody", "if (row < 0) return;", ""),
        ("one round only", "batch + gridDim.x * (blockDim.x / 32)", "num_batches"),
        ("batch lost", "atomicAdd(last_batch, 1u) + 1u", "atomicAdd(last_batch, 1u) + 2u"),
    ),
]
