"""Row numbers on the host: rows by SMs, through the CPU, both ways at once, and what "auto" takes.

Random distinct rows, pools of 0.2 to 64 GiB, both directions. A call through the CPU keeps the
host, so what counts is the time from one call to the end of the next few, on the GPU's clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench.goals import Figures, Goal, at_least
from bench.peers import host_pool
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import empty_rows, measure
from jitkern.offload import memory

PLOTS = ("ways",)

ROW_BYTES = 656
ROWS = (2_048, 8_192, 32_768, 131_072, 262_144)
POOLS_GIB = (0.2, 4, 16, 64)
SHORT_ROW_BYTES = 256
DEVICE_ROWS = 600_000
ORDERED = "SMs in order, pairs on the GPU"
AUTO = "auto"
FIXED = {"gather": ("sm", "cpu", "both"), "scatter": ("sm", "cpu")}


@dataclass
class Buffers:
    """One working set; the pool is common to all."""

    src: torch.Tensor
    dst: torch.Tensor
    pairs: torch.Tensor  # on the host
    gpu_pairs: torch.Tensor


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("ways: needs a GPU, skipped")
        return
    sizes = [gib for gib in host_pool.sizes(4 if ctx.quick else 96) if gib in POOLS_GIB]
    if not sizes:
        ctx.say("ways: no memory for a pool, skipped")
        return
    pool = host_pool.allocated(host_pool.sizes(4 if ctx.quick else 96)[-1])
    for kind in FIXED:
        for gib in sizes:
            for rows in (ROWS[1], ROWS[-1]) if ctx.quick else ROWS:
                yield from measure(ctx, _case(kind, pool, gib, rows, ROW_BYTES))
    for gib in (gib for gib in sizes if gib >= 16):
        yield from measure(ctx, _case("gather", pool, gib, 2 * ROWS[-1], SHORT_ROW_BYTES))
    yield from measure(ctx, _pageable(4 if ctx.quick else sizes[-1] / 2))


def goals(f: Figures) -> Iterator[Goal]:
    small = _gb_s(f, _name("gather", 0.2, ROWS[-1], ROW_BYTES), ORDERED)
    for gib, share in ((16, 0.95), (64, 0.90)):
        case = _name("gather", gib, ROWS[-1], ROW_BYTES)
        both = _gb_s(f, case, "both, 8 threads")
        if small and both:
            yield from at_least(
                f"both ways, 8 threads, {gib} GiB, of a small pool", both / small, share
            )
            alone = [_gb_s(f, case, name) or 0.0 for name in (ORDERED, "sm", "cpu, 8 threads")]
            yield from at_least(f"both ways, {gib} GiB, of the better one", both / max(alone), 1.0)
    by_cpu = _gb_s(f, _name("gather", 64, ROWS[-1], ROW_BYTES), "cpu, 15 threads")
    yield from at_least("through the CPU, 15 threads, 64 GiB, GB/s", by_cpu, 33.0)
    for gib, times in ((16, 1.3), (64, 1.6)):
        case = _name("gather", gib, 2 * ROWS[-1], SHORT_ROW_BYTES)
        got = f.speed("ways", case, "both", ORDERED)
        yield from at_least(f"{case}: both ways, of SMs in order", got, times)
    shares = [share for kind in FIXED for share in _shares_of_auto(f, kind)]
    if shares:
        near = sum(share >= 0.95 for share in shares)
        yield from at_least(f"auto: points of {len(shares)} within 5 % of the best", near, 36)
        yield from at_least("auto: of the best way, at the worst point", min(shares), 0.85)


def _shares_of_auto(f: Figures, kind: str) -> Iterator[float]:
    for gib in POOLS_GIB:
        for rows in ROWS:
            case = _name(kind, gib, rows, ROW_BYTES)
            speeds = [speed for name in FIXED[kind] if (speed := _gb_s(f, case, name))]
            if speeds and (auto := _gb_s(f, case, AUTO)):
                yield auto / max(speeds)


def _gb_s(f: Figures, case: str, impl: str) -> float | None:
    row = f.all("ways", case).get(impl)
    return row.gb_s if row else None


def _name(kind: str, gib: float, rows: int, row_bytes: int) -> str:
    return f"{kind} of {rows} rows of {row_bytes} B, pool of {gib:g} GiB"


def _case(kind: str, pool: torch.Tensor, gib: float, rows: int, row_bytes: int) -> Case:
    host = host_pool.rows_of(pool, gib, row_bytes)
    device = empty_rows(DEVICE_ROWS, row_bytes, "cuda", dtype=torch.uint8)
    if kind == "scatter":
        device.random_()

    def make(_: int) -> Buffers:
        numbers = host_pool.distinct(len(host), rows)
        slots = torch.randperm(DEVICE_ROWS, device="cuda")[:rows]
        gathers = kind == "gather"
        pairs = torch.stack([numbers, slots] if gathers else [slots, numbers], 1)
        small = pairs.to(torch.int32) if len(host) < 1 << 31 else pairs
        src, dst = (host, device) if gathers else (device, host)
        return Buffers(src, dst, pairs.cpu(), small)

    def outputs(b: Buffers) -> tuple[torch.Tensor, ...]:
        # Of the pool a copy of what is written: it is too large for another one.
        return (b.dst,) if kind == "gather" else (b.dst[b.pairs[:, 1]],)

    def erase(b: Buffers) -> None:
        if kind == "scatter":
            b.dst[b.pairs[:, 1]] = 0

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        if kind == "scatter":
            return (b.src[b.pairs[:, 0].cuda()].cpu(),)
        picked = b.src[b.pairs[:, 0]].cuda()
        return (b.dst.clone().index_copy_(0, b.pairs[:, 1].cuda(), picked),)

    return Case(
        op="ways",
        name=_name(kind, gib, rows, row_bytes),
        impls=list(_impls(kind, rows, row_bytes)),
        params={"kind": kind, "rows": rows, "row_bytes": row_bytes, "pool_gib": gib},
        bytes_moved=rows * row_bytes,
        bytes_note="bytes that arrive, each row once",
        make=make,
        outputs=outputs,
        reference=reference,
        prepare=erase,
        calls=3 if rows * row_bytes > 50_000_000 else 10,
    )


def _impls(kind: str, rows: int, row_bytes: int) -> Iterator[Impl]:
    op: Any = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter
    by_host = "source" if kind == "gather" else "destination"

    def way(method: str, num_threads: int | None = None) -> Run:
        return lambda b: op(b.src, b.dst, b.pairs, method=method, num_threads=num_threads)

    yield Impl(AUTO, "ours", lambda: way(AUTO), graph=False)
    for method in FIXED[kind]:
        yield Impl(method, "ours", lambda method=method: way(method), graph=False)
    yield Impl(
        ORDERED, "ours", lambda: lambda b: op(b.src, b.dst, b.gpu_pairs, order=by_host), graph=False
    )
    if rows < ROWS[-1]:
        return
    for method in FIXED[kind][1:]:
        for threads in (n for n in (4, 8, 15) if n <= len(os.sched_getaffinity(0))):
            name = f"{method}, {threads} threads"
            yield Impl(name, "ours", lambda m=method, n=threads: way(m, n), graph=False)
    yield Impl("torch: index on the CPU, copy" if kind == "gather" else "torch: index, copy",
               "peer", lambda: _by_torch(kind), graph=False)  # fmt: skip


def _by_torch(kind: str) -> Run:
    """What people write: rows picked on one side, one copy, rows put into place on the other."""

    def gather(b: Buffers) -> None:
        picked = b.src[b.pairs[:, 0]]
        b.dst[b.pairs[:, 1].cuda()] = picked.cuda()

    def scatter(b: Buffers) -> None:
        b.dst[b.pairs[:, 1]] = b.src[b.pairs[:, 0].cuda()].cpu()

    return gather if kind == "gather" else scatter


def _pageable(gib: float) -> Case:
    """Rows of memory that CUDA does not know."""
    cores = len(os.sched_getaffinity(0))
    bytes_ = memory.mapped(int(gib * host_pool.GIB))
    memory.touch(bytes_, 0, 1, cores, lambda *_: None)
    bytes_[::4096] = 1
    case = _case("gather", bytes_, gib, ROWS[-1], ROW_BYTES)
    case.name += ", pageable"
    case.impls = [impl for impl in case.impls if impl.name.startswith(("auto", "cpu", "torch"))]
    return case
