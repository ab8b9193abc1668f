"""h2d_gather: scattered rows of pinned host memory to rows on the GPU, and the ladder up to it.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes, random sources with repeats, unique destinations. GB/s counts a row's bytes once: what
arrives. Where repeats are fetched once, that goes past the bytes on the bus.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import MEMCPY, Figures, Goal, at_least, at_most
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
from jitkern.bench.measure import empty_rows, measure, random_rows

PEERS = (peers.ladder,)
PLOTS = ("ladder", "row sizes")


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("h2d_gather: needs a GPU, skipped")
        return
    yield from measure(ctx, case_of("repeats", ROWS, ROW_BYTES, _ladder(ctx)))
    yield from measure(ctx, case_of("distinct", ROWS, ROW_BYTES, _distinct(ctx)))
    if "reuse_resident" in _options():
        yield from measure(ctx, _resident_case())
    for rows in (1, 128, 2048) if ctx.quick else (1, 16, 128, 512, 2048, 8192):
        yield from measure(ctx, case_of("distinct", rows, ROW_BYTES, _small()))
    sizes = (4096,) if ctx.quick else (512, 576, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    for row_bytes in sizes:
        yield from measure(ctx, case_of("distinct", TOTAL_BYTES // row_bytes, row_bytes, _wide()))


def goals(f: Figures) -> Iterator[Goal]:
    op, two = "h2d_gather", TWO_SMS
    case = "262144 rows of 656 B, distinct"
    aligned = "6 line-aligned, 2 SMs"
    yield from at_least(f"h2d, {case}, 2 SMs: of {aligned}", f.speed(op, case, two, aligned), 0.99)
    yield from at_least(f"h2d, {case}, 2 SMs: of {MEMCPY}", f.speed(op, case, two, MEMCPY), 0.87)
    cost = f.speed(op, case, "jitkern, dedup=False", "jitkern, dedup=True")
    yield from at_most(f"h2d, {case}: dedup=True, time of dedup=False", cost, 1.02)
    case = "262144 rows of 656 B, repeats"
    yield from at_least(f"h2d, {case}: of {MEMCPY}", f.speed(op, case, "jitkern", MEMCPY), 1.25)
    for case in f.cases(op):
        rows = f.all(op, case)
        ours = rows.get("jitkern")
        if ours is None or not ours.median_us or not ours.gb_s:
            continue  # it failed, and its row says why
        rungs = [r.median_us for r in rows.values() if r.role == "peer" and r.median_us]
        if rungs and ours.bytes_moved and ours.bytes_moved <= 2048 * 656:
            name = f"h2d, {case}: time of the best rung"
            yield from at_most(name, ours.median_us / min(rungs), 1.2)
        sm_path = [r.gb_s for r in rows.values() if r.role == "sm ceiling" and r.gb_s]
        if sm_path and ours.params["sources"] == "distinct":
            limit = max(sm_path) * ours.params.get("line_efficiency", 1.0)
            name = f"h2d, {case}: of contiguous zero-copy x line efficiency"
            yield from at_least(name, ours.gb_s / limit, 0.95)


@lru_cache(maxsize=2)
def _slots(row_bytes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return source, destination and staging rows of one row size; the last two sizes are kept."""
    slots = SLOTS * ROW_BYTES // row_bytes
    src = random_rows(slots, row_bytes, "cpu", pin=True)
    staging = empty_rows(ROWS, row_bytes, "cpu", pin=True) if row_bytes == ROW_BYTES else src[:0]
    return src, empty_rows(slots, row_bytes, "cuda"), staging


def case_of(kind: str, rows: int, row_bytes: int, impls: list[Impl]) -> Case:
    src, dst, staging = _slots(row_bytes)
    slots = src.shape[0]

    def make(_: int) -> Buffers:
        to = torch.randperm(slots, device="cuda")[:rows]
        distinct = torch.randperm(slots, device="cuda")[:rows]
        repeats = torch.randint(0, slots, (rows,), device="cuda")
        pairs64 = torch.stack([repeats if kind == "repeats" else distinct, to], 1)
        return Buffers(src, dst, pairs64.to(torch.int32), pairs64, staging[:rows])

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0].cpu()].cuda()
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1], picked),)

    return Case(
        op="h2d_gather",
        name=f"{rows} rows of {row_bytes} B, {kind}",
        params={
            "rows": rows,
            "row_bytes": row_bytes,
            "slots": slots,
            "sources": kind,
            "line_efficiency": line_efficiency(row_bytes),
        },
        bytes_moved=rows * row_bytes,
        bytes_note="bytes that arrive, each row once",
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
        impls=impls,
        calls=3 if rows * row_bytes > 50_000_000 else 20,
        touched_bytes=row_bytes * rows,
    )


def line_efficiency(row_bytes: int) -> float:
    """Return wanted bytes / bytes of the 128-byte lines asked for, over rows in sequence."""
    starts = [i * row_bytes % 128 for i in range(128)]
    lines = [(start + row_bytes + 127) // 128 for start in starts]
    return row_bytes * len(lines) / (128 * sum(lines))


def _ladder(ctx: Context) -> list[Impl]:
    rungs = [
        Impl("1 thread a row, byte loads", "peer", lambda: rung(BYTE_LOADS)),
        Impl("2 thread a row, 16-byte loads", "peer", lambda: rung(VECTOR_LOADS)),
        Impl("3 warp a row", "peer", lambda: rung(WARP_A_ROW)),
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        Impl("5 persistent, 16 SMs", "peer", lambda: rung(LOADS_FIRST, 16)),
        Impl("5 persistent, 4 SMs", "peer", lambda: rung(LOADS_FIRST, 4)),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
    ]
    return [*ours_all(ctx), *rungs, *_outsiders(ctx), *ceilings()]


def _distinct(ctx: Context) -> list[Impl]:
    rungs = [
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        Impl("5 persistent, 4 SMs", "peer", lambda: rung(LOADS_FIRST, 4)),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
        Impl("6 line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4)),
    ]
    return [*ours_all(ctx), *rungs, *ceilings()]


def _small() -> list[Impl]:
    return [
        Impl("jitkern", "ours", lambda: ours()),
        Impl("3 warp a row", "peer", lambda: rung(WARP_A_ROW)),
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        Impl("6 line-aligned, full grid", "peer", lambda: rung(LINE_ALIGNED)),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
        Impl("cudaMemcpyAsync, contiguous", "ceiling", copy_engine, check=False),
        Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0),
    ]


def _wide() -> list[Impl]:
    return [
        Impl("jitkern", "ours", lambda: ours()),
        Impl("6 line-aligned, 2 SMs", "peer", lambda: rung(LINE_ALIGNED, 2)),
        Impl("4 loads before stores", "peer", lambda: rung(LOADS_FIRST)),
        *ceilings(),
    ]


TWO_SMS = "jitkern, num_sms=2, dedup=False"


def ours_all(ctx: Context) -> list[Impl]:
    """Return jitkern at its defaults and at chosen SM budgets, with and without dedup."""
    impls = [Impl("jitkern", "ours", lambda: ours())]
    budgets = (2,) if ctx.quick else (1, 2, 3, 4, 8, 16)
    for sms in budgets:
        impls.append(Impl(f"jitkern, num_sms={sms}", "ours", lambda sms=sms: ours(num_sms=sms)))
    if "dedup" in _options():
        for dedup in (False, True):
            name = f"jitkern, dedup={dedup}"
            impls.append(Impl(name, "ours", lambda dedup=dedup: ours(dedup=dedup)))
        impls.append(Impl(TWO_SMS, "ours", lambda: ours(num_sms=2, dedup=False)))
    return impls


def _options() -> list[str]:
    return list(inspect.signature(jitkern.h2d_gather).parameters)


def _resident_case() -> Case:
    """Half of the wanted rows are on the GPU already: in the lower half of the slots."""
    rows = SLOTS // 2
    base = case_of("distinct", rows, ROW_BYTES, [])
    plain = base.make
    maps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by working set: at first, in use

    def make(i: int) -> Buffers:
        b = plain(i)
        b.pairs64[:, 1] = torch.randperm(SLOTS - rows, device="cuda")[:rows] + rows
        b.pairs = b.pairs64.to(torch.int32)
        first = torch.full((SLOTS,), -1, dtype=torch.int32, device="cuda")
        resident = b.pairs64[: rows // 2, 0]
        first[resident] = torch.randperm(rows, device="cuda", dtype=torch.int32)[: rows // 2]
        maps[id(b.pairs)] = first, first.clone()
        return b

    there = random_rows(rows, ROW_BYTES, "cuda")

    def prepare(b: Buffers) -> None:
        b.dst[:rows] = there

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        first, _ = maps[id(b.pairs)]
        at = first[b.pairs64[:, 0]]
        fetched = b.src[b.pairs64[:, 0].cpu()].cuda()
        wanted = torch.where((at >= 0).unsqueeze(1), b.dst[at.clamp(min=0).long()], fetched)
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1], wanted),)

    def gather(b: Buffers) -> None:
        first, in_use = maps[id(b.pairs)]
        in_use.copy_(first)  # the call changes it; 1.2 MB on the GPU, in the timed region
        jitkern.h2d_gather(b.src, b.dst, b.pairs, slot_map=in_use, reuse_resident=True)

    base.name = f"{rows} rows of {ROW_BYTES} B, half of them resident"
    base.params["sources"] = "half resident"
    base.make, base.reference, base.prepare = make, reference, prepare
    base.impls = [
        Impl("jitkern, reuse_resident=True", "ours", lambda: gather),
        Impl("jitkern, all fetched", "ours", lambda: ours(), check=False),
        *ceilings(),
    ]
    return base


def ours(**options: Any) -> Run:
    return lambda b: jitkern.h2d_gather(b.src, b.dst, b.pairs, **options)


def _outsiders(ctx: Context) -> list[Impl]:
    impls = [Impl("triton", "peer", _triton)]
    if not ctx.quick:
        impls.append(Impl("torch: gather on the CPU, copy", "peer", lambda: _torch, graph=False))
    return impls


def _triton() -> Run:
    pairs = peers.triton().pairs

    def run_pairs(b: Buffers) -> None:
        pairs(b.src.view(torch.int32), b.dst.view(torch.int32), b.pairs, 132)

    return run_pairs


def _torch(b: Buffers) -> None:
    sources = b.pairs64[:, 0].cpu()
    torch.index_select(b.src, 0, sources, out=b.staging)
    b.dst.index_copy_(0, b.pairs64[:, 1], b.staging.to("cuda", non_blocking=True))
