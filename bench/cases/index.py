"""indexing: random rows of a table, with and without a vocabulary range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.store import empty_launch
from bench.measure import Case, Context, Impl, Row, Run, empty_rows, measure, random_rows
from jitkern.perf import copy_kernel

VOCAB = 131_072


@dataclass
class Buffers:
    weights: torch.Tensor
    indices: torch.Tensor  # int32, random with repeats, unsorted
    indices64: torch.Tensor
    output: torch.Tensor
    vocab_range: tuple[int, int] | None


@dataclass(frozen=True)
class Size:
    row_bytes: int
    rows: int
    sharded: bool = False


def run(ctx: Context) -> Iterator[Row]:
    for size in _sizes(ctx):
        yield from measure(ctx, case_of(ctx, size))


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
    device, row_bytes, rows = ctx.device, size.row_bytes, size.rows
    vocab = VOCAB if device == "cuda" else 16_384
    table_rows = vocab // 2 if size.sharded else vocab
    vocab_range = (vocab // 4, table_rows) if size.sharded else None
    weights = random_rows(table_rows, row_bytes, device)
    hits = rows // 2 if size.sharded else rows  # by construction, so that the bytes are exact

    def make(_: int) -> Buffers:
        start = vocab_range[0] if vocab_range else 0
        inside = start + torch.randint(0, table_rows, (hits,), device=device)
        outside = torch.randint(start + table_rows, vocab + 1, (rows - hits,), device=device)
        indices = torch.cat([inside, outside])[torch.randperm(rows, device=device)]
        return Buffers(
            weights,
            indices.to(torch.int32),
            indices,
            empty_rows(rows, row_bytes, device),
            vocab_range,
        )

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
        reference=_reference,
        impls=list(_impls(ctx, size)),
        calls=4 if rows > 16_384 else 8 if rows > 1024 else 50,
    )


def _reference(b: Buffers) -> tuple[torch.Tensor, ...]:
    if b.vocab_range is None:
        return (b.weights[b.indices64],)
    return (_masked(b.weights, b.indices64, *b.vocab_range),)


def _masked(weights: torch.Tensor, indices: torch.Tensor, start: int, count: int) -> torch.Tensor:
    at = indices - start
    inside = (at >= 0) & (at < count)
    rows = torch.nn.functional.embedding(at.masked_fill(~inside, 0), weights)
    return rows.masked_fill(~inside.unsqueeze(1), 0)


def _ours(b: Buffers) -> None:
    jitkern.indexing(b.weights, b.indices, output=b.output, vocab_range=b.vocab_range)


def _index_select(b: Buffers) -> None:
    torch.index_select(b.weights, 0, b.indices64, out=b.output)


def _embedding(b: Buffers) -> torch.Tensor:
    return torch.nn.functional.embedding(b.indices64, b.weights)


def _torch_masked(b: Buffers) -> torch.Tensor:
    assert b.vocab_range is not None
    return _masked(b.weights, b.indices64, *b.vocab_range)


def _copy_(b: Buffers) -> None:
    rows = b.output.shape[0]
    b.output.copy_(b.weights[:rows])


def _impls(ctx: Context, size: Size) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours)
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
        yield Impl("empty kernel", "floor", empty_launch, check=False, bytes_moved=0)


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
        masked: Any = torch.compile(_masked, dynamic=False)
        return lambda b: masked(b.weights, b.indices64, *b.vocab_range)
    plain: Any = torch.compile(_lookup, dynamic=False)
    return lambda b: plain(b.indices64, b.weights)


def _lookup(indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(indices, weights)


def _copy_kernel() -> Run:
    copy = copy_kernel()
    return lambda b: copy(b.output, b.weights[: b.output.shape[0]])
