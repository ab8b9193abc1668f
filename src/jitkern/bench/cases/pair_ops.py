"""Cases of the ops of pairs: scattered rows to scattered rows; on a GPU, what the link carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from jitkern.bench.case import Case, Context
from jitkern.bench.cases.common import CPU_SIZES, call_case, host_copy_case
from jitkern.bench.measure import empty_rows, random_rows

PairOp = Callable[..., None]
# On a GPU: a call that starts and ends within microseconds, and one that the bus decides. The
# source is the 0.2 GB of the usual benchmark; pools of real size are the full harness's business.
LINK_SIZES, LINK_SLOTS = ((128, 656), (262_144, 656)), 300_000


@dataclass
class Buffers:
    """One working set; the side in host memory is pinned where there is a GPU."""

    src: torch.Tensor
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 [rows, 2], sources and destinations distinct and unsorted

    @property
    def copied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As many rows in one piece, of the destination and of the source."""
        rows = self.pairs.shape[0]
        return self.dst[:rows], self.src[:rows]


def pair_cases(ctx: Context, op: str, function: PairOp, dst_device: str) -> Iterator[Case]:
    """Yield the cases of an op of pairs; `function` takes source, destination and pairs."""
    on_gpu = ctx.device == "cuda"
    for rows, row_bytes in LINK_SIZES if on_gpu else CPU_SIZES:
        yield case_of(ctx, op, function, dst_device, rows, row_bytes)
    yield from call_cases(ctx, op, function, dst_device)


def call_cases(ctx: Context, op: str, function: PairOp, dst_device: str) -> Iterator[Case]:
    """Yield what a call costs the host."""
    b = _buffers(ctx, dst_device, 64, 1, 656)
    for name, pairs in (("call, checks only", b.pairs[:0]), ("call, 1 row", b.pairs)):
        arguments = (b.src, b.dst, pairs)
        yield call_case(op, name, partial(function, *arguments), arguments)


def _buffers(ctx: Context, dst_device: str, slots: int, rows: int, row_bytes: int) -> Buffers:
    on_gpu = ctx.device == "cuda"
    src_device = "cpu" if dst_device == ctx.device else ctx.device
    return Buffers(
        random_rows(slots, row_bytes, src_device, pin=on_gpu and src_device == "cpu"),
        empty_rows(slots, row_bytes, dst_device, pin=on_gpu and dst_device == "cpu"),
        _pairs(ctx, slots, rows),
    )


def _pairs(ctx: Context, slots: int, rows: int) -> torch.Tensor:
    columns = [torch.randperm(slots, device=ctx.device)[:rows] for _ in range(2)]
    return torch.stack(columns, 1).to(torch.int32)


def case_of(
    ctx: Context, op: str, function: PairOp, dst_device: str, rows: int, row_bytes: int
) -> Case:
    """Return the case of one size: the op and a copy of as many rows in one piece."""
    slots = LINK_SLOTS if ctx.device == "cuda" else 2 * rows
    shared = _buffers(ctx, dst_device, slots, 1, row_bytes)

    def make(_: int) -> Buffers:
        return Buffers(shared.src, shared.dst, _pairs(ctx, slots, rows))

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        sources, targets = b.pairs.long().unbind(1)
        picked = b.src[sources.to(b.src.device)].to(dst_device)
        return (b.dst.clone().index_copy_(0, targets.to(dst_device), picked),)

    def copy(b: Buffers) -> None:
        dst, src = b.copied
        dst.copy_(src, non_blocking=True)

    return host_copy_case(
        ctx,
        moved=rows * row_bytes,
        ours=lambda b: function(b.src, b.dst, b.pairs),
        copy=copy,
        note="over the link, each row once",
        op=op,
        name=f"{rows} rows of {row_bytes} B",
        params={"rows": rows, "row_bytes": row_bytes, "slots": slots, "sources": "distinct"},
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
    )
