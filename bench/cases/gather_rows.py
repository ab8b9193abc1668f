"""gather_rows: random rows of a cache in an engine's format, as bfloat16.

The cache lies on the GPU, or in pinned host memory. Bytes: rows of the cache are read once, values
are written once; from host memory those that cross the link.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench.case import Case, Context, Row
from bench.cases import common
from bench.cases.common import ours, peer
from bench.cases.store_rows import COPY, FP8, MIN_SLOTS, MLA, counts, stored
from bench.measure import measure


def run(ctx: Context) -> Iterator[Row]:
    others = [peer("jitkern, indexing, then convert", _index_then_convert)]
    others += [peer("torch cache[idx] and ops", lambda b: _values(b.cache[b.at]), returns=True)]
    for rows in counts(ctx):
        yield from common.beside(ctx, case_of(ctx, rows), others, COPY, rows <= 256)
    for rows in (1, 256, 16_384) if ctx.device == "cuda" else ():
        case = case_of(ctx, rows, on_host=True)
        yield from measure(ctx, replace(case, impls=[case.ours(), others[0], case.impls[1]]))


def cases(ctx: Context) -> Iterator[Case]:
    yield case_of(ctx, counts(ctx)[-1])
    b = case_of(ctx, 1).make(0)
    empty = b.cache, b.indices[:0], tuple(output[:0] for output in b.outputs)
    one = b.cache, b.indices, b.outputs
    yield from common.call_cases("gather_rows", jitkern.gather_rows, empty, one, format=MLA.format)


def case_of(ctx: Context, rows: int, on_host: bool = False) -> Case:
    """Return the case of a number of rows: jitkern and a copy."""
    on_gpu, device = ctx.device == "cuda", ctx.device
    slots = max(2 * rows, MIN_SLOTS if on_gpu else 0)
    parts = [torch.randn(slots, items, device=device).bfloat16() for items in MLA.parts]
    (cache,) = stored(MLA, parts, None)
    cache = cache.cpu().pin_memory() if on_host else cache

    def make(number: int) -> SimpleNamespace:
        at = torch.randint(slots, (rows,), device=device)  # with repeats, unsorted
        workspace = torch.empty(rows, sum(MLA.parts), dtype=torch.bfloat16, device=device)
        return SimpleNamespace(
            cache=cache,
            copied=cache[number * rows % (slots - rows) :],  # others in each set, to be cold
            at=at,
            indices=at.to(torch.int32),
            workspace=workspace,
            outputs=workspace.split(MLA.parts, 1),
            dense=torch.empty(rows, MLA.row_bytes, dtype=torch.uint8, device=device),
            in_order=torch.arange(rows, dtype=torch.int32, device=device),
        )

    def gather(b: Any) -> None:
        jitkern.gather_rows(b.cache, b.indices, b.outputs, format=MLA.format)

    def copied(b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        written, read = b.workspace.view(torch.uint8).view(-1), b.copied.view(-1)
        if on_gpu:
            return written, read[: rows * MLA.row_bytes]
        return written[: moved // 2], read[: moved // 2]  # copy_ reads as many as it writes

    moved = rows * (MLA.row_bytes if on_host else MLA.row_bytes + MLA.read_bytes)
    copy = common.copy_impl(ctx, copied)
    if on_host:
        copy = common.memcpy(lambda b: b.dense, lambda b: cache, moved)
    return Case(
        op="gather_rows",
        name=f"{rows} rows, {MLA.name}" + ", host memory" * on_host,
        params={"rows": rows, "read_bytes": MLA.row_bytes, "written_bytes": MLA.read_bytes},
        bytes_moved=moved,
        make=make,
        outputs=lambda b: (b.workspace,),
        reference=lambda b: (_values(b.cache[b.at.to(b.cache.device)]).to(device),),
        impls=[ours(gather), copy],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def _index_then_convert(b: Any) -> None:
    jitkern.indexing(b.cache, b.indices, output=b.dense)
    jitkern.gather_rows(b.dense, b.in_order, b.outputs, format=MLA.format)


def _values(rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of bytes, in plain PyTorch."""
    groups = rows[:, :512].view(FP8).float().unflatten(1, (4, 128))
    scales = rows[:, 512:528].view(torch.float32).unsqueeze(2)
    values = (groups * scales).bfloat16().flatten(1)
    return torch.cat([values, rows[:, 528:].view(torch.bfloat16)], 1)
