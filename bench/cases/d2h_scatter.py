"""d2h_scatter: rows on the GPU to scattered rows of pinned host memory, the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import MEMCPY, Figures, Goal, at_least
from bench.peers.host_rows import (
    LINE_ALIGNED,
    LOADS_FIRST,
    ROW_BYTES,
    ROWS,
    SLOTS,
    Buffers,
    contiguous,
    copy_engine,
    rung,
)
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import empty_rows, measure, random_rows

PEERS = (peers.ladder,)


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("d2h_scatter: needs a GPU, skipped")
        return
    src = random_rows(SLOTS, ROW_BYTES, "cuda")
    dst = empty_rows(SLOTS, ROW_BYTES, "cpu", pin=True)
    for rows in (ROWS,) if ctx.quick else (1, 128, 2048, ROWS):
        yield from measure(ctx, _case(ctx, src, dst, rows))


def goals(f: Figures) -> Iterator[Goal]:
    case = "262144 rows of 656 B, distinct"
    got = f.speed("d2h_scatter", case, "jitkern", MEMCPY)
    yield from at_least(f"d2h, {case}: of {MEMCPY}", got, 0.85)


def _case(ctx: Context, src: torch.Tensor, dst: torch.Tensor, rows: int) -> Case:
    def make(_: int) -> Buffers:
        columns = [torch.randperm(SLOTS, device="cuda")[:rows] for _ in range(2)]
        pairs64 = torch.stack(columns, 1)
        return Buffers(src, dst, pairs64.to(torch.int32), pairs64, dst[:0])

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0]].cpu()
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1].cpu(), picked),)

    return Case(
        op="d2h_scatter",
        name=f"{rows} rows of {ROW_BYTES} B, distinct",
        params={"rows": rows, "row_bytes": ROW_BYTES, "slots": SLOTS},
        bytes_moved=rows * ROW_BYTES,
        bytes_note="bytes that arrive, each row once",
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
        impls=list(_impls(ctx, rows)),
        calls=3 if rows > 100_000 else 20,
    )


def _impls(ctx: Context, rows: int) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours())
    if rows == ROWS:
        for sms in (4,) if ctx.quick else (1, 2, 4, 8, 16):
            yield Impl(f"jitkern, num_sms={sms}", "ours", lambda sms=sms: _ours(num_sms=sms))
    yield Impl("loads before stores, full grid", "peer", lambda: rung(LOADS_FIRST))
    yield Impl("loads before stores, 4 SMs", "peer", lambda: rung(LOADS_FIRST, 4))
    yield Impl("line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4))
    yield Impl("cudaMemcpyAsync, contiguous", "ceiling", copy_engine, check=False)
    yield Impl("zero-copy kernel, contiguous, 132 SMs", "sm ceiling", contiguous, check=False)


def _ours(**options: Any) -> Run:
    scatter: Callable[..., object] = jitkern.d2h_scatter  # not there in the first versions
    return lambda b: scatter(b.src, b.dst, b.pairs, **options)
