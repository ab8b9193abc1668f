"""fast_compare_key: the common prefix of two keys that are equal, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl
from jitkern.bench.cases.common import call_case

LONG = 131_072


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures; there is nothing of it on a GPU."""
    if ctx.device == "cuda":
        return
    x = torch.randint(0, 150_000, (LONG,), dtype=torch.int32)
    y = x.clone()
    short = (x[:16], y[:16])
    yield call_case(
        "compare_key", "call, 16 tokens", partial(jitkern.fast_compare_key, *short), short
    )
    yield Case(
        op="compare_key",
        name=f"{LONG} equal int32 tokens",
        bytes_moved=2 * x.numel() * x.element_size(),
        bytes_note="both keys read once",
        make=lambda _: (x, y),
        impls=[
            Impl("jitkern", "ours", lambda: lambda b: jitkern.fast_compare_key(*b), check=False),
            Impl("torch.equal", "peer", lambda: lambda b: torch.equal(*b), check=False),
        ],
    )
