"""memcpy_2d_async, for the guard: every other row of host memory to packed rows."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench.case import Case, Context
from bench.cases import common

SIZES = ((32, 4096), (128, 131_072))  # in a cache, and in memory or over the link


def cases(ctx: Context) -> Iterator[Case]:
    kind = "h2d" if ctx.device == "cuda" else "h2h"
    for rows, row_bytes in SIZES:
        yield common.host_copy_case(
            ctx,
            rows * row_bytes,
            partial(_copy, row_bytes, rows, kind),
            op="memcpy_2d",
            name=f"{rows} rows of {row_bytes} B",
            make=partial(_buffers, ctx, rows, row_bytes),
            outputs=lambda b: (b.dst,),
            reference=lambda b: (b.src[:, 0].to(b.dst.device),),
        )
    b = _buffers(ctx, 1, 4096)
    for name, rows in (("call, checks only", 0), ("call, 1 row", 1)):
        call = partial(jitkern.memcpy_2d_async, b.dst, b.src, 4096, 8192, 4096, rows, kind)
        yield common.call_case("memcpy_2d", name, call, (b.dst, b.src))


def _copy(row_bytes: int, rows: int, kind: str, b: Any) -> None:
    jitkern.memcpy_2d_async(b.dst, b.src, row_bytes, 2 * row_bytes, row_bytes, rows, kind)


def _buffers(ctx: Context, rows: int, row_bytes: int, _: int = 0) -> SimpleNamespace:
    """Return source rows in host memory, pinned if there is a GPU, and packed rows for them."""
    src = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    src = src.pin_memory() if ctx.device == "cuda" else src
    return SimpleNamespace(
        src=src, dst=torch.zeros(rows, row_bytes, dtype=torch.uint8, device=ctx.device)
    )
