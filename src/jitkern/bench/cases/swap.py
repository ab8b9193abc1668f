"""swap_rows: rows of a cache for rows of the host; on a GPU, what the link carries both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.common import CPU_SIZES, call_case, host_copy_case
from jitkern.bench.cases.pair_ops import LINK_SIZES, LINK_SLOTS
from jitkern.bench.measure import random_rows


@dataclass
class Buffers:
    """One working set; the host's side is pinned where there is a GPU."""

    host: torch.Tensor
    gpu: torch.Tensor
    triples: torch.Tensor  # int32 [rows, 3], no row twice, unsorted


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for rows, row_bytes in LINK_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield case_of(ctx, rows, row_bytes)
    b = _buffers(ctx, 64, 1, 656)
    for name, triples in (("call, checks only", b.triples[:0]), ("call, 1 row", b.triples)):
        arguments = (b.host, b.gpu, triples)
        yield call_case("swap", name, partial(jitkern.swap_rows, *arguments), arguments)


def _buffers(ctx: Context, slots: int, rows: int, row_bytes: int) -> Buffers:
    return Buffers(
        random_rows(slots, row_bytes, "cpu", pin=ctx.device == "cuda"),
        random_rows(slots, row_bytes, ctx.device),
        _triples(ctx, slots, rows),
    )


def _triples(ctx: Context, slots: int, rows: int) -> torch.Tensor:
    host_rows, gpu_rows = (torch.randperm(slots, device=ctx.device) for _ in range(2))
    columns = host_rows[:rows], gpu_rows[:rows], host_rows[rows : 2 * rows]
    return torch.stack(columns, 1).to(torch.int32)


def case_of(ctx: Context, rows: int, row_bytes: int) -> Case:
    """Return the case of one size: the op, and copies of as many rows there and back."""
    slots = max(LINK_SLOTS if ctx.device == "cuda" else 0, 2 * rows)
    shared = _buffers(ctx, slots, 1, row_bytes)
    contents = shared.host.clone(), shared.gpu.clone()

    def make(_: int) -> Buffers:
        return Buffers(shared.host, shared.gpu, _triples(ctx, slots, rows))

    def refill(b: Buffers) -> None:
        b.host.copy_(contents[0])
        b.gpu.copy_(contents[1])

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        fetch, where, back = b.triples.long().unbind(1)
        host, gpu = b.host.clone(), b.gpu.clone()
        host[back.cpu()] = b.gpu[where].cpu()
        gpu[where] = b.host[fetch.cpu()].to(gpu.device)
        return host, gpu

    def copies(b: Buffers) -> None:
        b.gpu[:rows].copy_(b.host[:rows], non_blocking=True)
        b.host[:rows].copy_(b.gpu[-rows:], non_blocking=True)

    return host_copy_case(
        ctx,
        moved=2 * rows * row_bytes,
        ours=lambda b: jitkern.swap_rows(b.host, b.gpu, b.triples),
        copy=copies,
        note="over the link, both directions",
        op="swap",
        name=f"{rows} rows of {row_bytes} B",
        params={"rows": rows, "row_bytes": row_bytes, "slots": slots},
        make=make,
        outputs=lambda b: (b.host, b.gpu),
        reference=reference,
        prepare=refill,
    )
