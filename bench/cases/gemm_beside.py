"""What a gather costs the model: an 8192^3 bfloat16 GEMM beside it, and the gather beside the GEMM.

Both directions are timed inside a window that the other side fills from before to after; a row
whose window was too short is an error, not a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench import peers
from bench.cases.h2d_gather import case_of, ours
from bench.goals import MEMCPY, Figures, Goal, at_least, at_most
from bench.peers.host_rows import (
    LINE_ALIGNED,
    LOADS_FIRST,
    ROW_BYTES,
    ROWS,
    TOTAL_BYTES,
    Buffers,
    copy_engine,
    rung,
)
from jitkern.bench.case import Context, Row, Run, error_row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Timing

N = 8192
GEMMS = 6  # timed together
MAX_BACKGROUND = 400

PEERS = (peers.ladder,)
PLOTS = ("gemm",)


@dataclass
class Side:
    """One of the two workloads, on its own stream."""

    stream: torch.cuda.Stream
    call: Callable[[], object]
    alone_ms: float = 0.0


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("gemm_beside: needs a GPU, skipped")
        return
    a = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    gemm = Side(torch.cuda.Stream(), lambda: torch.mm(a, b, out=out))
    buffers = case_of("distinct", ROWS, ROW_BYTES, []).make(0)
    _warm(gemm)
    gemm.alone_ms = min(_window(gemm, None, GEMMS) for _ in range(3))
    alone = Row("gemm_beside", "GEMM alone", "torch.mm", "floor", {"n": N})
    alone.median_us = gemm.alone_ms * 1e3
    yield alone
    for name, role, sms, build in _gathers(ctx):
        ctx.say(f"gemm_beside: {name}")
        row = Row("gemm_beside", "GEMM beside a gather", name, role)
        row.params = {"n": N, "num_sms": sms, "rows": ROWS, "row_bytes": ROW_BYTES}
        try:
            _measure(ctx, row, gemm, build(), buffers)
        except Exception as error:  # a peer that fails is a row, not the end of the run
            row.error = error_row("", "", "", "", error).error
        yield row


def goals(f: Figures) -> Iterator[Goal]:
    rows = f.all("gemm_beside", "GEMM beside a gather")
    ours, engine = rows.get("jitkern"), rows.get(MEMCPY)
    if ours is None or engine is None:
        return
    more = ours.params["gemm_slowdown"] - engine.params["gemm_slowdown"]
    yield from at_most("GEMM beside h2d_gather: slowdown above the copy engine's", more, 0.05)

    def kept(row: Row) -> float:
        return float(row.params["gather_beside_gb_s"] / row.params["gather_alone_gb_s"])

    name = "h2d beside the GEMM: bandwidth kept, of what the copy engine keeps"
    yield from at_least(name, kept(ours) / kept(engine), 0.95)


def _gathers(ctx: Context) -> Iterator[tuple[str, str, int, Callable[[], Run]]]:
    yield "cudaMemcpyAsync, contiguous", "ceiling", 0, copy_engine
    yield "jitkern", "ours", -1, ours
    if not ctx.quick:
        for sms in (1, 2, 3, 4, 8, 16, 32, 132):
            yield f"jitkern, num_sms={sms}", "ours", sms, lambda sms=sms: ours(num_sms=sms)
        yield "6 line-aligned, 2 SMs", "peer", 2, lambda: rung(LINE_ALIGNED, 2)
        yield "5 persistent, 16 SMs", "peer", 16, lambda: rung(LOADS_FIRST, 16)
    yield "4 loads before stores, full grid", "peer", 132, lambda: rung(LOADS_FIRST)


def _measure(ctx: Context, row: Row, gemm: Side, run_gather: Run, buffers: Buffers) -> None:
    gather = Side(torch.cuda.Stream(), lambda: run_gather(buffers))
    _warm(gather)
    gather.alone_ms = min(_window(gather, None, 3) for _ in range(2))
    repeats = 3 if ctx.quick else 5
    gemm_ms = [_window(gemm, gather, GEMMS) for _ in range(repeats)]
    gather_ms = [_window(gather, gemm, 3) for _ in range(repeats)]
    fill(row, Timing(tuple(gemm_ms)))
    beside = Timing(tuple(gather_ms))
    row.params["gemm_slowdown"] = Timing(tuple(gemm_ms)).median_ms / gemm.alone_ms
    row.params["gather_alone_gb_s"] = TOTAL_BYTES / (gather.alone_ms * 1e6)
    row.params["gather_beside_gb_s"] = beside.gb_s(TOTAL_BYTES)
    row.note = (
        f"GEMM x {row.params['gemm_slowdown']:.2f}; gather "
        f"{row.params['gather_alone_gb_s']:.1f} GB/s alone, "
        f"{row.params['gather_beside_gb_s']:.1f} beside the GEMM"
    )


def _warm(side: Side) -> None:
    with torch.cuda.stream(side.stream):
        for _ in range(2):
            side.call()
    torch.cuda.synchronize()


def _window(front: Side, back: Side | None, calls: int) -> float:
    """Return ms per call of `front` while `back` runs from before the first to after the last."""
    torch.cuda.synchronize()
    tic, toc, started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    if back is not None:
        # Twice the time that the front would take if the other side doubled it.
        count = int(4 * calls * front.alone_ms / back.alone_ms) + 3
        with torch.cuda.stream(back.stream):
            back.call()
            started.record()
            for _ in range(min(count, MAX_BACKGROUND)):
                back.call()
            ended.record()
        front.stream.wait_event(started)
    with torch.cuda.stream(front.stream):
        tic.record()
        for _ in range(calls):
            front.call()
        toc.record()
    torch.cuda.synchronize()
    if back is not None and toc.elapsed_time(ended) <= 0:
        raise RuntimeError("the other side ended before the timed calls did")
    return tic.elapsed_time(toc) / calls
