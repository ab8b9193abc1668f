"""memcpy_2d_async: one block of every layer, a strided copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.common import call_case, host_copy_case

BLOCKS = 4
# (layers, bytes of a block in one layer): in a cache, and in memory or over the link.
SIZES = ((32, 4096), (128, 131_072))


@dataclass
class Buffers:
    """A pool of a few blocks in host memory, pinned where there is a GPU, and one block."""

    pool: torch.Tensor  # [layers, BLOCKS, bytes]
    block: torch.Tensor  # [layers, bytes]

    def copy(self, height: int) -> None:
        """Bring the second block of the pool."""
        width = self.block.shape[1]
        kind = "h2d" if self.block.is_cuda else "h2h"
        arguments = (width, BLOCKS * width, width, height, kind)
        jitkern.memcpy_2d_async(self.block, self.pool[:, 1], *arguments)  # type: ignore[arg-type]


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for layers, width in SIZES:
        yield case_of(ctx, layers, width)
    b = _buffers(ctx, 1, 4096)
    for name, height in (("call, checks only", 0), ("call, 1 row", 1)):
        yield call_case("memcpy_2d", name, partial(b.copy, height), (b.block, b.pool))


def _buffers(ctx: Context, layers: int, width: int) -> Buffers:
    pool = torch.randint(0, 256, (layers, BLOCKS, width), dtype=torch.uint8)
    block = torch.zeros(layers, width, dtype=torch.uint8, device=ctx.device)
    return Buffers(pool.pin_memory() if ctx.device == "cuda" else pool, block)


def case_of(ctx: Context, layers: int, width: int) -> Case:
    """Return the case of one size: the op, and a copy of as many bytes in one piece."""
    moved = layers * width

    def copy(b: Buffers) -> None:
        b.block.view(-1).copy_(b.pool.view(-1)[:moved], non_blocking=True)

    return host_copy_case(
        ctx,
        moved=moved,
        ours=lambda b: b.copy(layers),
        copy=copy,
        op="memcpy_2d",
        name=f"{layers} rows of {width} B",
        params={"rows": layers, "row_bytes": width, "pitch": BLOCKS * width},
        make=lambda _: _buffers(ctx, layers, width),
        outputs=lambda b: (b.block,),
        reference=lambda b: (b.pool[:, 1].to(b.block.device),),
    )
