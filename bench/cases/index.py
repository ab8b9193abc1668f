"""indexing: random rows of a table, with and without a vocabulary range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench import peers
from bench.goals import Figures, Goal, at_least, cpu_goals
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.cases.common import copy_kernel
from jitkern.bench.cases.index import VOCAB, Buffers, Size, masked, ours
from jitkern.bench.cases.index import case_of as guarded
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
PLOTS = ("of a copy",)


def run(ctx: Context) -> Iterator[Row]:
    for size in _sizes(ctx):
        yield from measure(ctx, case_of(ctx, size))


def goals(f: Figures) -> Iterator[Goal]:
    for case in f.cases("index"):
        if not case.startswith("65536 "):
            continue
        for other, wanted in (
            ("copy kernel", 0.97),
            ("torch index_select(out=)", 1.05),
            ("torch F.embedding", 1.05),
        ):
            got = f.speed("index", case, "jitkern", other)
            yield from at_least(f"indexing, {case}: of {other}", got, wanted)
    yield from cpu_goals(f, "index")


def _sizes(ctx: Context) -> list[Size]:
    if ctx.device == "cpu":
        wide = [Size(n, 8192) for n in (656, 2048, 8192)]
        return wide[:1] if ctx.quick else [*wide, Size(2048, 8192, sharded=True)]
    if ctx.quick:
        return [Size(8192, 1), Size(8192, 65_536), Size(656, 65_536), Size(8192, 65_536, True)]
    counts = (1, 64, 1024, 16_384, 65_536)
    plain = [Size(n, rows) for n in (656, 7168, 8192) for rows in counts]
    return [*plain, Size(8192, 1024, True), Size(8192, 65_536, True), Size(656, 65_536, True)]


def case_of(ctx: Context, size: Size) -> Case:
    """Return the guard's case with every peer in it."""
    return replace(guarded(ctx, size), impls=list(_impls(ctx, size)))


def _index_select(b: Buffers) -> None:
    torch.index_select(b.weights, 0, b.indices64, out=b.output)


def _embedding(b: Buffers) -> torch.Tensor:
    return torch.nn.functional.embedding(b.indices64, b.weights)


def _torch_masked(b: Buffers) -> torch.Tensor:
    assert b.vocab_range is not None
    return masked(b.weights, b.indices64, *b.vocab_range)


def _copy_(b: Buffers) -> None:
    rows = b.output.shape[0]
    b.output.copy_(b.weights[:rows])


def _impls(ctx: Context, size: Size) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: ours)
    if size.sharded:
        yield Impl("torch mask + embedding", "peer", lambda: _torch_masked, returns=True)
    else:
        yield Impl("torch index_select(out=)", "peer", lambda: _index_select)
        yield Impl("torch F.embedding", "peer", lambda: _embedding, returns=True)
    if ctx.device == "cuda":
        if size.row_bytes in peers.INDEX_ROW_BYTES:
            yield Impl("nvcc, mini-sglang style", "peer", lambda: _nvcc(size.row_bytes))
        yield Impl("triton", "peer", _triton)
        if not ctx.quick and size.rows == 65_536:
            yield Impl("torch.compile", "peer", lambda: _compiled(size.sharded), returns=True)
    copied = 2 * min(size.rows, VOCAB) * size.row_bytes
    if ctx.device == "cpu":
        yield Impl(
            "copy_ of as many rows", "ceiling", lambda: _copy_, check=False, bytes_moved=copied
        )
        return
    yield Impl("copy kernel", "ceiling", _copy_kernel, check=False, bytes_moved=copied)
    yield Impl("torch copy_", "ceiling", lambda: _copy_, check=False, bytes_moved=copied)
    if size.rows <= 1024:
        yield Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0)


def _nvcc(row_bytes: int) -> Run:
    index = getattr(peers.rows(), f"index_{row_bytes}")

    def run_index(b: Buffers) -> None:
        start, count = b.vocab_range or (0, b.weights.shape[0])
        index(b.weights, b.indices, b.output, start, count)

    return run_index


def _triton() -> Run:
    index = peers.triton().index

    def run_index(b: Buffers) -> None:
        start, count = b.vocab_range or (0, b.weights.shape[0])
        index(b.weights.view(torch.int32), b.indices, b.output.view(torch.int32), start, count)

    return run_index


def _compiled(sharded: bool) -> Run:
    if sharded:
        split: Any = torch.compile(masked, dynamic=False)
        return lambda b: split(b.weights, b.indices64, *b.vocab_range)
    plain: Any = torch.compile(_lookup, dynamic=False)
    return lambda b: plain(b.indices64, b.weights)


def _lookup(indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(indices, weights)


def _copy_kernel() -> Run:
    copy = copy_kernel()
    return lambda b: copy(b.output, b.weights[: b.output.shape[0]])
