"""h2d_gather: scattered rows of pinned host memory to rows on the GPU.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes, random sources with repeats, unique destinations. GB/s counts a row's bytes once: what
arrives. Where repeats are fetched once, that goes past the bytes on the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import (
    CPU_SIZES,
    call_cases,
    empty_kernel,
    empty_rows,
    host_copy_case,
    ours,
    peer,
    random_rows,
)
from bench.peers.host_rows import (
    ROW_BYTES,
    ROWS,
    SLOTS,
    Buffers,
    contiguous,
    copy_engine,
    kernel,
    pairs_job,
)
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.link, peers.host)
NEEDS_GPU = True
# (rows, bytes of a row) of the guard on a GPU: microseconds, and what the bus decides.
LINK_SIZES = ((128, 656), (262_144, 656))
SMALL_ROWS = (1, 16, 128, 512, 2048, 8192)
WIDE_BYTES = (512, 576, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def run(ctx: Context) -> Iterator[Row]:
    for repeats in (True, False):
        yield from measure(ctx, _case(ctx, ROWS, ROW_BYTES, _impls(ctx), repeats))
    for rows in SMALL_ROWS[::2] if ctx.quick else SMALL_ROWS:
        impls = [
            ours(_ours()),
            kernel("loads before stores"),
            kernel("line-aligned"),
            kernel("line-aligned", 2),
            copy_engine(),
            empty_kernel(),
        ]
        yield from measure(ctx, _case(ctx, rows, ROW_BYTES, impls))
    for row_bytes in WIDE_BYTES[4:5] if ctx.quick else WIDE_BYTES:
        impls = [ours(_ours()), kernel("line-aligned", 2), kernel("loads before stores")]
        impls += [copy_engine(), contiguous(132)]
        yield from measure(ctx, _case(ctx, ROWS * ROW_BYTES // row_bytes, row_bytes, impls))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    yield from pair_cases(ctx, "h2d_gather", jitkern.h2d_gather, ctx.device)


def _ours(**options: Any) -> Run:
    options = {"method": "sm", **options}  # nothing runs beside
    return lambda b: jitkern.h2d_gather(b.src, b.dst, b.pairs, **options)


def _impls(ctx: Context) -> list[Impl]:
    options: list[dict[str, Any]] = [{}, {"dedup": False}, {"num_sms": 2, "dedup": False}]
    options += [{"num_sms": sms} for sms in ((2,) if ctx.quick else (1, 2, 4, 8, 16))]
    names = [", ".join(["jitkern", *(f"{k}={v}" for k, v in one.items())]) for one in options]
    staging = empty_rows(ROWS, ROW_BYTES, "cpu", pin=True)

    def triton(b: Buffers) -> None:
        words = b.src.view(torch.int32), b.dst.view(torch.int32)
        peers.triton().pairs(*words, b.pairs, 132)

    def on_cpu(b: Buffers) -> None:
        torch.index_select(b.src, 0, b.pairs64[:, 0].cpu(), out=staging)
        b.dst.index_copy_(0, b.pairs64[:, 1], staging.to("cuda", non_blocking=True))

    return [
        *(ours(_ours(**one), name) for one, name in zip(options, names, strict=True)),
        kernel("loads before stores"),
        kernel("line-aligned", 2),
        copy_engine(),
        contiguous(132),
        peer("triton", triton),
        peer("torch: gather on the CPU, copy", on_cpu, graph=False),
    ]


def _case(
    ctx: Context, rows: int, row_bytes: int, impls: list[Impl], repeats: bool = False
) -> Case:
    kind, slots = "repeats" if repeats else "distinct", SLOTS * ROW_BYTES // row_bytes
    return Case(
        op="h2d_gather",
        name=f"{rows} rows of {row_bytes} B, {kind}",
        params={"rows": rows, "row_bytes": row_bytes, "sources": kind},
        bytes_moved=rows * row_bytes,
        impls=impls,
        calls=3 if rows * row_bytes > 50_000_000 else 20,
        **pairs_job(*sides(ctx, ctx.device, slots, row_bytes), rows, repeats),
    )


# -- any op of pairs -------------------------------------------------------------------------------


def pair_cases(
    ctx: Context, op: str, function: Callable[..., None], dst_device: str
) -> Iterator[Case]:
    """Yield the guard's cases of an op that takes a source, a destination and pairs."""
    link_slots = SLOTS if ctx.device == "cuda" else 0
    for rows, row_bytes in LINK_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield host_copy_case(
            ctx,
            rows * row_bytes,
            lambda b: function(b.src, b.dst, b.pairs),
            lambda b, rows=rows: b.dst[:rows].copy_(b.src[:rows], non_blocking=True),
            op=op,
            name=f"{rows} rows of {row_bytes} B",
            **pairs_job(*sides(ctx, dst_device, max(2 * rows, link_slots), row_bytes), rows),
        )
    b = pairs_job(*sides(ctx, dst_device, 64, 656), 1)["make"](0)
    yield from call_cases(op, function, (b.src, b.dst, b.pairs[:0]), (b.src, b.dst, b.pairs))


@lru_cache(maxsize=2)
def sides(
    ctx: Context, dst_device: str, slots: int, row_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source and destination; the one in host memory is pinned if there is a GPU."""
    on_gpu = ctx.device == "cuda"
    src_device = "cpu" if dst_device == ctx.device else ctx.device
    src = random_rows(slots, row_bytes, src_device, pin=on_gpu and src_device == "cpu")
    return src, empty_rows(slots, row_bytes, dst_device, pin=on_gpu and dst_device == "cpu")
