"""d2h_scatter: rows of a cache to scattered host rows, the way back of h2d_gather."""

from __future__ import annotations

from collections.abc import Iterator

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.pair_ops import call_cases, pair_cases


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: on the CPU its copies are those of h2d_gather."""
    made = pair_cases if ctx.device == "cuda" else call_cases
    yield from made(ctx, "d2h_scatter", jitkern.d2h_scatter, "cpu")
