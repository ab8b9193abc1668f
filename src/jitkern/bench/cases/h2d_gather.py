"""h2d_gather: scattered host rows to scattered rows of a cache."""

from __future__ import annotations

from collections.abc import Iterator

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.pair_ops import pair_cases


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    yield from pair_cases(ctx, "h2d_gather", jitkern.h2d_gather, ctx.device)
