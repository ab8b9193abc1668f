"""write_twice: beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from bench.cases.common import call_case, empty_rows, random_rows
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

CASE = "1024 rows of 656 B"


def run(ctx: Context) -> Iterator[Row]:
    rows, output = random_rows(1024, 656, ctx.device), empty_rows(2048, 656, ctx.device)
    yield from measure(
        ctx,
        Case(
            op="twice",
            name=CASE,
            bytes_moved=3 * 1024 * 656,
            bytes_note="read once, written twice",
            make=lambda _: (rows, output),
            outputs=lambda b: (b[1],),
            reference=lambda b: (b[0].repeat_interleave(2, dim=0),),
            impls=[
                Impl("jitkern", "ours", lambda: lambda b: jitkern.write_twice(*b)),
                Impl("torch", "peer", lambda: _torch, returns=True),
            ],
        ),
    )


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    rows = torch.ones(1, 656, dtype=torch.uint8, device=ctx.device)
    output = torch.zeros(2, 656, dtype=torch.uint8, device=ctx.device)
    for name, arguments in (
        ("call, checks only", (rows[:0], output[:0])),
        ("call, 1 row", (rows, output)),
    ):
        yield call_case("twice", name, partial(jitkern.write_twice, *arguments), arguments)


def _torch(b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return b[0].repeat_interleave(2, dim=0)
