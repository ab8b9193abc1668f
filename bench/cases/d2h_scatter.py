"""d2h_scatter: rows on the GPU to scattered rows of pinned host memory, the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import jitkern
from bench import peers
from bench.cases.common import MEMCPY, empty_rows, lacks_gpu, random_rows
from bench.cases.h2d_gather import pair_cases
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
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.ladder,)


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "d2h_scatter"):
        return
    src = random_rows(SLOTS, ROW_BYTES, "cuda")
    dst = empty_rows(SLOTS, ROW_BYTES, "cpu", pin=True)
    for rows in (ROWS,) if ctx.quick else (1, 128, 2048, ROWS):
        yield from measure(ctx, _case(src, dst, rows))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: on the CPU its copies are those of h2d_gather."""
    for case in pair_cases(ctx, "d2h_scatter", jitkern.d2h_scatter, "cpu"):
        if ctx.device == "cuda" or case.name.startswith("call"):
            yield case


def _case(src: torch.Tensor, dst: torch.Tensor, rows: int) -> Case:
    def make(_: int) -> Buffers:
        columns = [torch.randperm(SLOTS, device="cuda")[:rows] for _ in range(2)]
        pairs64 = torch.stack(columns, 1)
        return Buffers(src, dst, pairs64.to(torch.int32), pairs64, dst[:0])

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0]].cpu()
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1].cpu(), picked),)

    def ours(num_sms: int | None = None) -> Impl:
        name = "jitkern" if num_sms is None else f"jitkern, num_sms={num_sms}"
        # Nothing runs beside.
        options = {"method": "sm"} if num_sms is None else {"num_sms": num_sms}
        return Impl(
            name, "ours", lambda: lambda b: jitkern.d2h_scatter(b.src, b.dst, b.pairs, **options)
        )

    return Case(
        op="d2h_scatter",
        name=f"{rows} rows of {ROW_BYTES} B, distinct",
        params={"rows": rows, "row_bytes": ROW_BYTES, "slots": SLOTS},
        bytes_moved=rows * ROW_BYTES,
        bytes_note="bytes that arrive, each row once",
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
        impls=[
            ours(),
            *(ours(sms) for sms in ((1, 2, 4, 8, 16) if rows == ROWS else ())),
            Impl("loads before stores, full grid", "peer", lambda: rung(LOADS_FIRST)),
            Impl("loads before stores, 4 SMs", "peer", lambda: rung(LOADS_FIRST, 4)),
            Impl("line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4)),
            Impl(MEMCPY, "ceiling", copy_engine, check=False),
            Impl("zero-copy kernel, contiguous, 132 SMs", "sm ceiling", contiguous, check=False),
        ],
        calls=3 if rows > 100_000 else 20,
    )
