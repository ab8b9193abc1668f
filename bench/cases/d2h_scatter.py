"""d2h_scatter: rows on the GPU to scattered rows of pinned host memory, the way back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jitkern
from bench import peers
from bench.cases.common import ours
from bench.cases.h2d_gather import pair_cases, sides
from bench.peers.host_rows import (
    ROW_BYTES,
    ROWS,
    SLOTS,
    Buffers,
    contiguous,
    copy_engine,
    kernel,
    pairs_job,
)
from jitkern.bench.case import Case, Context, Row
from jitkern.bench.measure import measure

PEERS = (peers.link, peers.host)
NEEDS_GPU = True


def run(ctx: Context) -> Iterator[Row]:
    for rows in (ROWS,) if ctx.quick else (1, 128, 2048, ROWS):
        sweep = (1, 2, 4, 8, 16) if rows == ROWS else ()
        case = Case(
            op="d2h_scatter",
            name=f"{rows} rows of {ROW_BYTES} B, distinct",
            bytes_moved=rows * ROW_BYTES,  # what arrives, each row once
            impls=[
                ours(partial(_ours, method="sm")),  # nothing runs beside
                *(ours(partial(_ours, num_sms=n), f"jitkern, num_sms={n}") for n in sweep),
                kernel("loads before stores"),
                kernel("line-aligned", 4),
                copy_engine(),
                contiguous(132),
            ],
            calls=3 if rows > 100_000 else 20,
            **pairs_job(*sides(ctx, "cpu", SLOTS, ROW_BYTES), rows),
        )
        yield from measure(ctx, case)


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: on the CPU its copies are those of h2d_gather."""
    for case in pair_cases(ctx, "d2h_scatter", jitkern.d2h_scatter, "cpu"):
        if ctx.device == "cuda" or case.name.startswith("call"):
            yield case


def _ours(b: Buffers, **options: Any) -> None:
    jitkern.d2h_scatter(b.src, b.dst, b.pairs, **options)
