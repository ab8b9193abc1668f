"""h2d_gather: scattered rows of pinned host memory to rows on the GPU.

GB/s counts a row's bytes once: what arrives. If repeats are fetched once, that can exceed the bytes
on the bus.
"""

from collections.abc import Iterator
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import pairs
from bench.cases.common import empty_kernel, ours, peer
from bench.cases.pairs import ROW_BYTES, ROWS, SLOTS, contiguous, copy_engine, kernel
from bench.measure import measure

NEEDS_GPU = True
SMALL_ROWS = (1, 16, 128, 512, 2048, 8192)
WIDE_BYTES = (512, 576, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def run(ctx: Context) -> Iterator[Row]:
    for repeats in (True, False):
        yield from measure(ctx, _case(ctx, ROWS, ROW_BYTES, _impls(ctx), repeats))
    for rows in SMALL_ROWS[::2] if ctx.quick else SMALL_ROWS:
        impls = [_ours(), kernel("loads before stores"), kernel("line-aligned")]
        impls += [kernel("line-aligned", 2), copy_engine(), empty_kernel()]
        yield from measure(ctx, _case(ctx, rows, ROW_BYTES, impls))
    for row_bytes in WIDE_BYTES[4:5] if ctx.quick else WIDE_BYTES:
        impls = [_ours(), kernel("line-aligned", 2), kernel("loads before stores")]
        impls += [copy_engine(), contiguous()]
        yield from measure(ctx, _case(ctx, ROWS * ROW_BYTES // row_bytes, row_bytes, impls))


def cases(ctx: Context) -> Iterator[Case]:
    yield from pairs.guard_cases(ctx, "h2d_gather", jitkern.h2d_gather, ctx.device)


def _ours(**options: Any) -> Impl:
    name = ", ".join(["jitkern", *(f"{key}={value}" for key, value in options.items())])
    options["method"] = "sm"  # nothing runs beside
    return ours(lambda b: jitkern.h2d_gather(b.src, b.dst, b.pairs, **options), name)


def _impls(ctx: Context) -> list[Impl]:
    def triton(b: Any) -> None:
        words = b.src.view(torch.int32), b.dst.view(torch.int32)
        peers.triton().pairs(*words, b.pairs, 132)

    return [
        *(_ours(), _ours(dedup=False), _ours(num_sms=2, dedup=False)),
        *(_ours(num_sms=sms) for sms in ((2,) if ctx.quick else (1, 2, 4, 8, 16))),
        kernel("loads before stores"),
        kernel("line-aligned", 2),
        copy_engine(),
        contiguous(),
        peer("triton", triton),
    ]


def _case(
    ctx: Context, rows: int, row_bytes: int, impls: list[Impl], repeats: bool = False
) -> Case:
    sides = pairs.sides_of(ctx, ctx.device, SLOTS * ROW_BYTES // row_bytes, row_bytes)
    kind = "repeats" if repeats else "distinct"
    name = f"{rows} rows of {row_bytes} B, {kind}"
    params = {"rows": rows, "row_bytes": row_bytes, "sources": kind}
    return pairs.case_of("h2d_gather", name, sides, rows, impls, params, repeats)
