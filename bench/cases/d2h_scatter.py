"""d2h_scatter: rows on the GPU to scattered rows of pinned host memory, the way back."""

from collections.abc import Iterator
from typing import Any

import jitkern
from bench.case import Case, Context, Impl, Row
from bench.cases import pairs
from bench.cases.common import ours
from bench.cases.pairs import ROW_BYTES, ROWS, SLOTS
from bench.measure import measure

NEEDS_GPU = True


def run(ctx: Context) -> Iterator[Row]:
    for rows in (ROWS,) if ctx.quick else (1, 128, 2048, ROWS):
        impls = [_ours("jitkern", method="sm")]  # nothing runs beside
        if rows == ROWS:
            impls += [_ours(f"jitkern, num_sms={n}", num_sms=n) for n in (1, 2, 4, 8, 16)]
        impls += [pairs.kernel("loads before stores"), pairs.kernel("line-aligned", 4)]
        impls += [pairs.copy_engine(), pairs.contiguous()]
        sides = pairs.sides_of(ctx, "cpu", SLOTS, ROW_BYTES)
        name = f"{rows} rows of {ROW_BYTES} B, distinct"
        yield from measure(ctx, pairs.case_of("d2h_scatter", name, sides, rows, impls))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: on the CPU its copies are those of h2d_gather."""
    for case in pairs.guard_cases(ctx, "d2h_scatter", jitkern.d2h_scatter, "cpu"):
        if ctx.device == "cuda" or case.name.startswith("call"):
            yield case


def _ours(name: str, **options: Any) -> Impl:
    return ours(lambda b: jitkern.d2h_scatter(b.src, b.dst, b.pairs, **options), name)
