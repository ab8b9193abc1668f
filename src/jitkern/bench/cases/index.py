"""indexing: random rows of a table, with and without a vocabulary range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl
from jitkern.bench.cases.common import call_case, copy_impl, sizes
from jitkern.bench.measure import empty_rows, random_rows

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
        yield call_case(
            "index",
            name,
            partial(jitkern.indexing, table, indices, output=output),
            (table, indices, output),
        )
    yield call_case(
        "index", "call, 1 row, new output", partial(jitkern.indexing, table, one), (table, one)
    )


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
        reference=_reference,
        impls=[
            Impl("jitkern", "ours", lambda: ours),
            copy_impl(ctx, lambda b: (b.output, b.weights[: b.output.shape[0]])),
        ],
        calls=4 if rows > 16_384 else 8 if rows > 1024 else 50,
    )


def _reference(b: Buffers) -> tuple[torch.Tensor, ...]:
    if b.vocab_range is None:
        return (b.weights[b.indices64],)
    return (masked(b.weights, b.indices64, *b.vocab_range),)


def masked(weights: torch.Tensor, indices: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return what ``vocab_range`` means, in plain PyTorch."""
    at = indices - start
    inside = (at >= 0) & (at < count)
    rows = torch.nn.functional.embedding(at.masked_fill(~inside, 0), weights)
    return rows.masked_fill(~inside.unsqueeze(1), 0)


def ours(b: Buffers) -> None:
    """Call the op."""
    jitkern.indexing(b.weights, b.indices, output=b.output, vocab_range=b.vocab_range)
