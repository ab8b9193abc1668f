"""indexing: random rows of a table, with and without a vocabulary range.

Bytes: every row written once, every row inside the range read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

import jitkern
from bench import peers
from bench.cases.common import (
    call_case,
    ceiling,
    copy_impl,
    empty_kernel,
    empty_rows,
    ours,
    peer,
    random_rows,
    sizes,
)
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
VOCAB, CPU_VOCAB = 131_072, 16_384


@dataclass
class Buffers:
    """One working set."""

    weights: torch.Tensor
    indices: torch.Tensor  # int32, random with repeats, unsorted
    indices64: torch.Tensor
    output: torch.Tensor
    vocab_range: tuple[int, int] | None


def run(ctx: Context) -> Iterator[Row]:
    counts = (1, 64, 1024, 16_384, 65_536)
    # (bytes of a row, rows, whether half of them lie in another rank's part)
    all_sizes = [(n, rows, False) for n in (656, 7168, 8192) for rows in counts]
    all_sizes += [(8192, 1024, True), (8192, 65_536, True), (656, 65_536, True)]
    if ctx.device == "cpu":
        all_sizes = [(n, 8192, False) for n in (656, 2048, 8192)]
        all_sizes = all_sizes[:1] if ctx.quick else [*all_sizes, (2048, 8192, True)]
    elif ctx.quick:
        all_sizes = [(8192, 1, False), (8192, 65_536, False), (656, 65_536, False)]
        all_sizes += [(8192, 65_536, True)]
    for size in all_sizes:
        yield from measure(ctx, replace(case_of(ctx, *size), impls=_impls(ctx, *size)))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for rows, row_bytes in sizes(ctx):
        yield case_of(ctx, row_bytes, rows)
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


def case_of(ctx: Context, row_bytes: int, rows: int, sharded: bool = False) -> Case:
    """Return the case of one size: jitkern and a copy of as many rows."""
    device = ctx.device
    vocab = VOCAB if device == "cuda" else CPU_VOCAB
    table_rows = vocab // 2 if sharded else vocab
    vocab_range = (vocab // 4, table_rows) if sharded else None
    weights = random_rows(table_rows, row_bytes, device)
    hits = rows // 2 if sharded else rows  # by construction, so that the bytes are exact

    def make(_: int) -> Buffers:
        start = vocab_range[0] if vocab_range else 0
        inside = start + torch.randint(0, table_rows, (hits,), device=device)
        outside = torch.randint(start + table_rows, vocab + 1, (rows - hits,), device=device)
        indices = torch.cat([inside, outside])[torch.randperm(rows, device=device)]
        output = empty_rows(rows, row_bytes, device)
        return Buffers(weights, indices.to(torch.int32), indices, output, vocab_range)

    return Case(
        op="index",
        name=f"{rows} rows of {row_bytes} B" + ", vocab_range" * sharded,
        params={"row_bytes": row_bytes, "rows": rows, "vocab_range": vocab_range},
        bytes_moved=(hits + rows) * row_bytes,
        make=make,
        outputs=lambda b: (b.output,),
        reference=lambda b: (_embedding(b) if b.vocab_range is None else _masked(b),),
        impls=[ours(_ours), copy_impl(ctx, _copy_pair)],
        calls=4 if rows > 16_384 else 8 if rows > 1024 else 50,
    )


def _ours(b: Buffers) -> None:
    jitkern.indexing(b.weights, b.indices, output=b.output, vocab_range=b.vocab_range)


def _index_select(b: Buffers) -> None:
    torch.index_select(b.weights, 0, b.indices64, out=b.output)


def _embedding(b: Buffers) -> torch.Tensor:
    return functional.embedding(b.indices64, b.weights)


def _masked(b: Buffers) -> torch.Tensor:
    """Return what ``vocab_range`` means, in plain PyTorch."""
    assert b.vocab_range is not None
    at = b.indices64 - b.vocab_range[0]
    inside = (at >= 0) & (at < b.vocab_range[1])
    rows = functional.embedding(at.masked_fill(~inside, 0), b.weights)
    return rows.masked_fill(~inside.unsqueeze(1), 0)


def _copy_pair(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    return b.output, b.weights[: b.output.shape[0]]


def _impls(ctx: Context, row_bytes: int, rows: int, sharded: bool) -> list[Impl]:
    def nvcc(b: Buffers) -> None:
        start, count = b.vocab_range or (0, b.weights.shape[0])
        index = getattr(peers.rows(), f"index_{row_bytes}")
        index(b.weights, b.indices, b.output, start, count)

    def triton(b: Buffers) -> None:
        start, count = b.vocab_range or (0, b.weights.shape[0])
        words = b.weights.view(torch.int32), b.output.view(torch.int32)
        peers.triton().index(words[0], b.indices, words[1], start, count)

    def copy_(b: Buffers) -> None:
        dst, src = _copy_pair(b)
        dst.copy_(src)

    impls = [ours(_ours)]
    if sharded:
        impls += [peer("torch mask + embedding", _masked, returns=True)]
    else:
        impls += [peer("torch index_select(out=)", _index_select)]
        impls += [peer("torch F.embedding", _embedding, returns=True)]
    copied = 2 * rows * row_bytes
    name = "copy kernel" if ctx.device == "cuda" else "copy_ of as many rows"
    impls += [replace(copy_impl(ctx, _copy_pair, name), bytes_moved=copied)]
    if ctx.device == "cpu":
        return impls
    if row_bytes in peers.INDEX_ROW_BYTES:
        impls += [peer("nvcc, mini-sglang style", nvcc)]
    impls += [peer("triton", triton), ceiling("torch copy_", copy_, bytes_moved=copied)]
    return [*impls, empty_kernel()] if rows <= 1024 else impls
