"""write_twice: rows of a table to two rows each, beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.common import call_case


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    rows = torch.ones(1, 656, dtype=torch.uint8, device=ctx.device)
    output = torch.zeros(2, 656, dtype=torch.uint8, device=ctx.device)
    for name, arguments in (
        ("call, checks only", (rows[:0], output[:0])),
        ("call, 1 row", (rows, output)),
    ):
        yield call_case("twice", name, partial(jitkern.write_twice, *arguments), arguments)
