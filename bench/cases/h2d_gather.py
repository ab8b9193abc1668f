"""h2d_gather: scattered rows of pinned host memory to rows on the GPU, and the ladder up to it.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes, random sources with repeats, unique destinations. GB/s counts a row's bytes once: what
arrives. Where repeats are fetched once, that goes past the bytes on the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import (
    CPU_SIZES,
    MEMCPY,
    call_case,
    empty_rows,
    host_copy_case,
    lacks_gpu,
    random_rows,
)
from bench.peers.host_rows import (
    BYTE_LOADS,
    LINE_ALIGNED,
    LOADS_FIRST,
    ROW_BYTES,
    ROWS,
    SLOTS,
    TOTAL_BYTES,
    VECTOR_LOADS,
    WARP_A_ROW,
    Buffers,
    ceilings,
    copy_engine,
    rung,
)
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.ladder,)
PLOTS = ("ladder", "row sizes")
# (rows, bytes of a row) of the guard on a GPU: microseconds, and what the bus decides.
LINK_SIZES = ((128, 656), (262_144, 656))
SMALL_ROWS = (1, 16, 128, 512, 2048, 8192)
WIDE_BYTES = (512, 576, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "h2d_gather"):
        return
    yield from measure(ctx, _case("repeats", ROWS, ROW_BYTES, _ladder(ctx)))
    yield from measure(ctx, _case("distinct", ROWS, ROW_BYTES, _ladder(ctx)[:-2]))
    for rows in SMALL_ROWS[::2] if ctx.quick else SMALL_ROWS:
        yield from measure(ctx, _case("distinct", rows, ROW_BYTES, _small()))
    for row_bytes in WIDE_BYTES[4:5] if ctx.quick else WIDE_BYTES:
        impls = [
            Impl("jitkern", "ours", _ours),
            Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
            Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
            *ceilings(),
        ]
        yield from measure(ctx, _case("distinct", TOTAL_BYTES // row_bytes, row_bytes, impls))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    yield from pair_cases(ctx, "h2d_gather", jitkern.h2d_gather, ctx.device)


# -- the guard's cases, for every op of pairs ------------------------------------------------------


def pair_cases(
    ctx: Context, op: str, function: Callable[..., None], dst_device: str
) -> Iterator[Case]:
    """Yield the guard's cases of an op that takes a source, a destination and pairs."""
    for rows, row_bytes in LINK_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield _pair_case(ctx, op, function, dst_device, rows, row_bytes)
    b = _pair_buffers(ctx, dst_device, 64, 1, 656)
    for name, pairs in (("call, checks only", b.pairs[:0]), ("call, 1 row", b.pairs)):
        arguments = (b.src, b.dst, pairs)
        yield call_case(op, name, partial(function, *arguments), arguments)


def _pair_case(
    ctx: Context,
    op: str,
    function: Callable[..., None],
    dst_device: str,
    rows: int,
    row_bytes: int,
) -> Case:
    slots = SLOTS if ctx.device == "cuda" else 2 * rows

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0].to(b.src.device)].to(dst_device)
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1].to(dst_device), picked),)

    return host_copy_case(
        ctx,
        rows * row_bytes,
        lambda b: function(b.src, b.dst, b.pairs),
        lambda b: b.dst[:rows].copy_(b.src[:rows], non_blocking=True),
        op=op,
        name=f"{rows} rows of {row_bytes} B",
        params={"rows": rows, "row_bytes": row_bytes, "slots": slots, "sources": "distinct"},
        make=lambda _: _pair_buffers(ctx, dst_device, slots, rows, row_bytes),
        outputs=lambda b: (b.dst,),
        reference=reference,
    )


@lru_cache(maxsize=2)
def _sides(
    device: str, dst_device: str, slots: int, row_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source and destination; the side in host memory is pinned where there is a GPU."""
    on_gpu = device == "cuda"
    src_device = "cpu" if dst_device == device else device
    src = random_rows(slots, row_bytes, src_device, pin=on_gpu and src_device == "cpu")
    return src, empty_rows(slots, row_bytes, dst_device, pin=on_gpu and dst_device == "cpu")


def _pair_buffers(ctx: Context, dst_device: str, slots: int, rows: int, row_bytes: int) -> Buffers:
    src, dst = _sides(ctx.device, dst_device, slots, row_bytes)
    columns = [torch.randperm(slots, device=ctx.device)[:rows] for _ in range(2)]
    pairs64 = torch.stack(columns, 1)
    return Buffers(src, dst, pairs64.to(torch.int32), pairs64, dst[:0])


# -- beside the ladder -----------------------------------------------------------------------------


def _case(kind: str, rows: int, row_bytes: int, impls: list[Impl]) -> Case:
    slots = SLOTS * ROW_BYTES // row_bytes
    src, dst = _sides("cuda", "cuda", slots, row_bytes)

    def make(_: int) -> Buffers:
        to = torch.randperm(slots, device="cuda")[:rows]
        distinct = torch.randperm(slots, device="cuda")[:rows]
        repeats = torch.randint(0, slots, (rows,), device="cuda")
        pairs64 = torch.stack([repeats if kind == "repeats" else distinct, to], 1)
        return Buffers(src, dst, pairs64.to(torch.int32), pairs64, _staging()[:rows])

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0].cpu()].cuda()
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1], picked),)

    return Case(
        op="h2d_gather",
        name=f"{rows} rows of {row_bytes} B, {kind}",
        params={"rows": rows, "row_bytes": row_bytes, "slots": slots, "sources": kind},
        bytes_moved=rows * row_bytes,
        bytes_note="bytes that arrive, each row once",
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
        impls=impls,
        calls=3 if rows * row_bytes > 50_000_000 else 20,
    )


@lru_cache(maxsize=1)
def _staging() -> torch.Tensor:
    return empty_rows(ROWS, ROW_BYTES, "cpu", pin=True)


def _ours(**options: Any) -> Run:
    options = {"method": "sm", **options}  # nothing runs beside
    return lambda b: jitkern.h2d_gather(b.src, b.dst, b.pairs, **options)


def _ladder(ctx: Context) -> list[Impl]:
    budgets = (2,) if ctx.quick else (1, 2, 4, 8, 16)
    options: list[dict[str, Any]] = [{}, *({"num_sms": sms} for sms in budgets)]
    options += [{"dedup": False}, {"dedup": True}, {"num_sms": 2, "dedup": False}]
    impls = []
    for one in options:
        name = ", ".join(["jitkern", *(f"{key}={value}" for key, value in one.items())])
        impls.append(Impl(name, "ours", partial(_ours, **one)))
    return [
        *impls,
        Impl("1 thread a row, byte loads", "peer", lambda: rung(BYTE_LOADS)),
        Impl("2 thread a row, 16-byte loads", "peer", lambda: rung(VECTOR_LOADS)),
        Impl("3 warp a row", "peer", lambda: rung(WARP_A_ROW)),
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        Impl("5 persistent, 16 SMs", "peer", lambda: rung(LOADS_FIRST, 16)),
        Impl("5 persistent, 4 SMs", "peer", lambda: rung(LOADS_FIRST, 4)),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
        Impl("6 line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4)),
        *ceilings(),
        Impl("triton", "peer", _triton),
        Impl("torch: gather on the CPU, copy", "peer", lambda: _torch, graph=False),
    ]


def _small() -> list[Impl]:
    return [
        Impl("jitkern", "ours", _ours),
        Impl("3 warp a row", "peer", lambda: rung(WARP_A_ROW)),
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        Impl("6 line-aligned, full grid", "peer", lambda: rung(LINE_ALIGNED)),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
        Impl(MEMCPY, "ceiling", copy_engine, check=False),
        Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0),
    ]


def _triton() -> Run:
    pairs = peers.triton().pairs
    return lambda b: pairs(b.src.view(torch.int32), b.dst.view(torch.int32), b.pairs, 132)


def _torch(b: Buffers) -> None:
    torch.index_select(b.src, 0, b.pairs64[:, 0].cpu(), out=b.staging)
    b.dst.index_copy_(0, b.pairs64[:, 1], b.staging.to("cuda", non_blocking=True))
