"""indexing: random rows of a table, with and without a vocabulary range.

Bytes: every row written once, every row inside the range read once.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.cases.common import ours, peer

VOCAB, CPU_VOCAB = 131_072, 16_384


def run(ctx: Context) -> Iterator[Row]:
    on_gpu = ctx.device == "cuda"
    counts = (1, 64, 1024, 2048, 16_384, 65_536) if on_gpu else (8192,)
    if ctx.quick:
        counts = counts[-1:]
    # (bytes of a row, rows, whether half of them lie in another rank's part)
    all_sizes = [(n, rows, False) for n in (656, 7168, 8192) for rows in counts]
    all_sizes += [(8192, rows, True) for rows in counts[-3::2]] + [(656, counts[-1], True)]
    for size in all_sizes:
        case = case_of(ctx, *size)
        yield from common.beside(ctx, case, _peers(ctx, *size), is_small=size[1] <= 2048)


def cases(ctx: Context) -> Iterator[Case]:
    for rows, row_bytes in common.sizes(ctx):
        yield case_of(ctx, row_bytes, rows)
    table = torch.ones(64, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    row = torch.zeros(1, 656, dtype=torch.uint8, device=ctx.device)
    empty = ("call, checks only", one[:0], row[:0])
    for name, indices, output in (empty, ("call, 1 row", one, row)):
        call = partial(jitkern.indexing, table, indices, output=output)
        yield common.call_case("index", name, call, (table, indices, output))
    call = partial(jitkern.indexing, table, one)
    yield common.call_case("index", "call, 1 row, new output", call, (table, one))


def case_of(ctx: Context, row_bytes: int, rows: int, sharded: bool = False) -> Case:
    device = ctx.device
    vocab = VOCAB if device == "cuda" else CPU_VOCAB
    table_rows = vocab // 2 if sharded else vocab
    vocab_range = (vocab // 4, table_rows) if sharded else None
    weights = common.random_rows(table_rows, row_bytes, device)
    hits = rows // 2 if sharded else rows  # by construction, so that the bytes are exact

    def make(_: int) -> SimpleNamespace:
        start = vocab_range[0] if vocab_range else 0
        inside = start + torch.randint(0, table_rows, (hits,), device=device)
        outside = torch.randint(start + table_rows, vocab + 1, (rows - hits,), device=device)
        indices = torch.cat([inside, outside])[torch.randperm(rows, device=device)]
        return SimpleNamespace(
            weights=weights,
            indices=indices.to(torch.int32),  # with repeats, unsorted
            indices64=indices,
            output=common.empty_rows(rows, row_bytes, device),
            vocab_range=vocab_range,
        )

    def index(b: Any) -> None:
        jitkern.indexing(b.weights, b.indices, output=b.output, vocab_range=b.vocab_range)

    copy = common.copy_impl(ctx, lambda b: (b.output, b.weights[:rows]))
    return Case(
        op="index",
        name=f"{rows} rows of {row_bytes} B" + ", vocab_range" * sharded,
        params={"row_bytes": row_bytes, "rows": rows, "vocab_range": vocab_range},
        bytes_moved=(hits + rows) * row_bytes,
        make=make,
        outputs=lambda b: (b.output,),
        reference=lambda b: (_masked(b) if sharded else _embedding(b),),
        impls=[ours(index), replace(copy, bytes_moved=2 * rows * row_bytes)],
        calls=4 if rows > 16_384 else 8 if rows > 1024 else 50,
    )


def _embedding(b: Any) -> torch.Tensor:
    return functional.embedding(b.indices64, b.weights)


def _masked(b: Any) -> torch.Tensor:
    """Return what ``vocab_range`` means, in plain PyTorch."""
    start, count = b.vocab_range
    at = b.indices64 - start
    outside = (at < 0) | (at >= count)
    rows = functional.embedding(at.masked_fill(outside, 0), b.weights)
    return rows.masked_fill(outside.unsqueeze(1), 0)


def _peers(ctx: Context, row_bytes: int, rows: int, sharded: bool) -> list[Impl]:
    def nvcc(b: Any) -> None:
        start, count = b.vocab_range or (0, len(b.weights))
        index = getattr(peers.rows(), f"index_{row_bytes}")
        index(b.weights, b.indices, b.output, start, count)

    def triton(b: Any) -> None:
        start, count = b.vocab_range or (0, len(b.weights))
        weights, output = b.weights.view(torch.int32), b.output.view(torch.int32)
        peers.triton().index(weights, b.indices, output, start, count)

    def index_select(b: Any) -> None:
        torch.index_select(b.weights, 0, b.indices64, out=b.output)

    found = [peer("torch mask + embedding", _masked, returns=True)]
    if not sharded:
        found = [peer("torch index_select(out=)", index_select)]
        found += [peer("torch F.embedding", _embedding, returns=True)]
    if ctx.device == "cuda":
        if row_bytes in peers.INDEX_ROW_BYTES:
            found += [peer("nvcc, mini-sglang style", nvcc)]
        found += [peer("triton", triton)]
    return found
