"""indexing: random rows of a table, with and without a vocabulary range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import jitkern
from bench import peers
from bench.cases.common import call_case, copy_impl, empty_rows, random_rows, sizes
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
PLOTS = ("of a copy",)
VOCAB, CPU_VOCAB = 131_072, 16_384


@dataclass
class Buffers:
    """One working set."""

    weights: torch.Tensor
    indices: torch.Tensor  # int32, random with repeats, unsorted
    indices64: torch.Tensor
    output: torch.Tensor
    vocab_range: tuple[int, int] | None


@dataclass(frozen=True)
class Size:
    """Rows that are asked for, and whether half of them lie in another rank's part."""

    row_bytes: int
    rows: int
    sharded: bool = False


def run(ctx: Context) -> Iterator[Row]:
    for size in _sizes(ctx):
        yield from measure(ctx, replace(case_of(ctx, size), impls=list(_impls(ctx, size))))


def _sizes(ctx: Context) -> list[Size]:
    if ctx.device == "cpu":
        wide = [Size(n, 8192) for n in (656, 2048, 8192)]
        return wide[:1] if ctx.quick else [*wide, Size(2048, 8192, sharded=True)]
    if ctx.quick:
        return [Size(8192, 1), Size(8192, 65_536), Size(656, 65_536), Size(8192, 65_536, True)]
    counts = (1, 64, 1024, 16_384, 65_536)
    plain = [Size(n, rows) for n in (656, 7168, 8192) for rows in counts]
    return [*plain, Size(8192, 1024, True), Size(8192, 65_536, True), Size(656, 65_536, True)]


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for rows, row_bytes in sizes(ctx):
        yield case_of(ctx, Size(row_bytes, rows))
    table = torch.ones(64, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    row = torch.zeros(1, 656, dtype=torch.uint8, device=ctx.device)
    for name, indices, output in (
        ("call, checks only", one[:0], row[:0]),
        ("call, 1 row", one, row),
    ):
        call = partial(jitkern.indexing, table, indices, output=output)
        yield call_case("index", name, call, (table, indices, output))
    call = partial(jitkern.indexing, table, one)
    yield call_case("index", "call, 1 row, new output", call, (table, one))


def case_of(ctx: Context, size: Size) -> Case:
    """Return the case of one size: jitkern and a copy of as many rows."""
    device, row_bytes, rows = ctx.device, size.row_bytes, size.rows
    vocab = VOCAB if device == "cuda" else CPU_VOCAB
    table_rows = vocab // 2 if size.sharded else vocab
    vocab_range = (vocab // 4, table_rows) if size.sharded else None
    weights = random_rows(table_rows, row_bytes, device)
    hits = rows // 2 if size.sharded else rows  # by construction, so that the bytes are exact

    def make(_: int) -> Buffers:
        start = vocab_range[0] if vocab_range else 0
        inside = start + torch.randint(0, table_rows, (hits,), device=device)
        outside = torch.randint(start + table_rows, vocab + 1, (rows - hits,), device=device)
        indices = torch.cat([inside, outside])[torch.randperm(rows, device=device)]
        output = empty_rows(rows, row_bytes, device)
        return Buffers(weights, indices.to(torch.int32), indices, output, vocab_range)

    return Case(
        op="index",
        name=f"{rows} rows of {row_bytes} B" + (", vocab_range" if size.sharded else ""),
        params={
            "row_bytes": row_bytes,
            "rows": rows,
            "table_rows": table_rows,
            "vocab_range": vocab_range,
            "dtype": "bfloat16",
        },
        bytes_moved=(hits + rows) * row_bytes,
        bytes_note="every row written once, every row inside the range read once",
        make=make,
        outputs=lambda b: (b.output,),
        reference=lambda b: (_embedding(b) if b.vocab_range is None else _masked_of(b),),
        impls=[
            Impl("jitkern", "ours", lambda: _ours),
            copy_impl(ctx, _copy_pair),
        ],
        calls=4 if rows > 16_384 else 8 if rows > 1024 else 50,
    )


def _ours(b: Buffers) -> None:
    jitkern.indexing(b.weights, b.indices, output=b.output, vocab_range=b.vocab_range)


def _index_select(b: Buffers) -> None:
    torch.index_select(b.weights, 0, b.indices64, out=b.output)


def _embedding(b: Buffers) -> torch.Tensor:
    return functional.embedding(b.indices64, b.weights)


def _masked(weights: torch.Tensor, indices: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return what ``vocab_range`` means, in plain PyTorch."""
    at = indices - start
    inside = (at >= 0) & (at < count)
    rows = functional.embedding(at.masked_fill(~inside, 0), weights)
    return rows.masked_fill(~inside.unsqueeze(1), 0)


def _masked_of(b: Buffers) -> torch.Tensor:
    assert b.vocab_range is not None
    return _masked(b.weights, b.indices64, *b.vocab_range)


def _copy_pair(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    return b.output, b.weights[: b.output.shape[0]]


def _copy_(b: Buffers) -> None:
    dst, src = _copy_pair(b)
    dst.copy_(src)


def _impls(ctx: Context, size: Size) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours)
    if size.sharded:
        yield Impl("torch mask + embedding", "peer", lambda: _masked_of, returns=True)
    else:
        yield Impl("torch index_select(out=)", "peer", lambda: _index_select)
        yield Impl("torch F.embedding", "peer", lambda: _embedding, returns=True)
    copied = 2 * min(size.rows, VOCAB) * size.row_bytes
    name = "copy kernel" if ctx.device == "cuda" else "copy_ of as many rows"
    yield replace(copy_impl(ctx, _copy_pair, name), bytes_moved=copied)
    if ctx.device == "cpu":
        return
    if size.row_bytes in peers.INDEX_ROW_BYTES:
        yield Impl("nvcc, mini-sglang style", "peer", lambda: _nvcc(size.row_bytes))
    yield Impl("triton", "peer", _triton)
    if not ctx.quick and size.rows == 65_536:
        yield Impl("torch.compile", "peer", lambda: _compiled(size.sharded), returns=True)
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
        split: Any = torch.compile(_masked, dynamic=False)
        return lambda b: split(b.weights, b.indices64, *b.vocab_range)
    plain: Any = torch.compile(lambda i, w: functional.embedding(i, w), dynamic=False)
    return lambda b: plain(b.indices64, b.weights)
