"""write_twice: beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import jitkern
from bench.goals import Figures, Goal, at_least
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import empty_rows, measure, random_rows

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


def goals(f: Figures) -> Iterator[Goal]:
    yield from at_least(
        f"twice, {CASE}: of torch", f.speed("twice", CASE, "jitkern", "torch"), 0.01
    )


def _torch(b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return b[0].repeat_interleave(2, dim=0)
