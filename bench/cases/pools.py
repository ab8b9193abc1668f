"""Host memory of the size that servers keep, 0.2 to 64 GiB: h2d_gather, d2h_scatter, indexing.

Random rows of more than 0.5 GiB miss in the translation of the link's addresses. Here are rows as
they come and in the order of the pool, uniform and by Zipf's law, beside the same kernels as peers,
the way of those who sort (sglang, vLLM: the ids, with PyTorch), and the copy engine. Tables of
`indexing` are read beside a kernel that reads them where they lie, as engines do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import MEMCPY
from bench.peers import host_pool
from bench.peers.host_rows import LINE_ALIGNED, LOADS_FIRST, ROW_BYTES, ROWS, copy_engine, rung
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import empty_rows, measure

PEERS = (peers.ladder,)
PLOTS = ("pools",)

GIVEN = "jitkern, as they come"
UVA = "triton, rows where they lie"
TOKEN_ROWS = 24 * 1024  # of an n-gram table: 24 rows for each of 1,024 tokens
SORT = "torch.argsort, then 6 line-aligned, 4 SMs"
DEVICE_ROWS = 600_000


@dataclass
class Buffers:
    """One working set; `src` or `dst` is the pool, whole pages of which no other set writes."""

    src: torch.Tensor
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 where the rows are few enough, else int64
    pairs64: torch.Tensor


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("pools: needs a GPU, skipped")
        return
    sizes = host_pool.sizes(4 if ctx.quick else 96)
    if not sizes:
        ctx.say("pools: no memory for a pool, skipped")
        return
    ctx.say(f"pools: a pool of {sizes[-1]} GiB")
    pool = host_pool.allocated(sizes[-1])
    for case in _gathers(pool, sizes):
        yield from measure(ctx, case)
    for case in _tables(pool, sizes):
        yield from measure(ctx, case)
    for case in _scatters(pool, sizes):  # last, as they write the pool
        yield from measure(ctx, case)


def _name(kind: str, rows: int, row_bytes: int, gib: float, law: str = "uniform") -> str:
    return f"{kind} of {rows} rows of {row_bytes} B, pool of {gib:g} GiB, {law}"


def _gathers(pool: torch.Tensor, sizes: list[float]) -> Iterator[Case]:
    for gib in sizes:
        yield _gather(pool, gib, ROWS, ROW_BYTES)
    for gib in (gib for gib in sizes if gib in (0.2, 4, 16, 64)):
        yield _gather(pool, gib, 32_768, ROW_BYTES)
        yield _gather(pool, gib, ROWS, ROW_BYTES, "Zipf(1.1)")
        yield _gather(pool, gib, 2 * ROWS, 256)
        yield _gather(pool, gib, 2 * ROWS, 8)
    for gib in (gib for gib in sizes if gib == 16):
        yield _gather(pool, gib, 2048, ROW_BYTES)
        yield _gather(pool, gib, 8192, ROW_BYTES)
        yield _gather(pool, gib, ROWS // 4, 4 * ROW_BYTES)


def _gather(
    pool: torch.Tensor, gib: float, rows: int, row_bytes: int, law: str = "uniform"
) -> Case:
    src = host_pool.rows_of(pool, gib, row_bytes)
    dst = empty_rows(DEVICE_ROWS, row_bytes, "cuda", dtype=torch.uint8)

    def make(_: int) -> Buffers:
        to = torch.randperm(DEVICE_ROWS, device="cuda")[:rows]
        return Buffers(src, dst, *_pairs(_rows(src.shape[0], rows, law), to, src.shape[0]))

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        picked = b.src[b.pairs64[:, 0].cpu()].cuda()
        return (b.dst.clone().index_copy_(0, b.pairs64[:, 1], picked),)

    return Case(
        **_facts("gather", gib, rows, row_bytes, law),
        make=make,
        outputs=lambda b: (b.dst,),
        reference=reference,
    )


def _tables(pool: torch.Tensor, sizes: list[float]) -> Iterator[Case]:
    for gib in (gib for gib in sizes if gib in (0.2, 4, 16, 64)):
        for law in ("uniform", "Zipf(1.1)"):
            yield _table(pool, gib, TOKEN_ROWS, 256, law)
            yield _table(pool, gib, 2 * ROWS, 256, law)
    for gib in (gib for gib in sizes if gib == 16):
        yield _table(pool, gib, 24, 256, "uniform")
        yield _table(pool, gib, 24 * 64, 256, "uniform")

    for gib in (gib for gib in sizes if gib in (4, 16)):
        yield _two_tables(pool, gib, TOKEN_ROWS)


def _two_tables(pool: torch.Tensor, gib: float, rows: int) -> Case:
    """Values of 256 B and their scales of 8 B, which lie behind them."""
    num_rows = int(gib * host_pool.GIB) // 264
    values = pool[: 256 * num_rows].view(num_rows, 256)
    scales = pool[256 * num_rows : 264 * num_rows].view(num_rows, 8)

    def make(_: int) -> TableBuffers:
        indices = _rows(num_rows, rows, "uniform").to(torch.int32)
        outputs = [torch.empty(rows, n, dtype=torch.uint8, device="cuda") for n in (256, 8)]
        return TableBuffers(values, indices, outputs[0], scales, outputs[1], indices)

    def together(b: TableBuffers) -> None:
        jitkern.indexing((b.table, b.src), b.indices, output=(b.output, b.dst))

    def in_turn(b: TableBuffers) -> None:
        jitkern.indexing(b.table, b.indices, output=b.output)
        jitkern.indexing(b.src, b.indices, output=b.dst)

    def reference(b: TableBuffers) -> tuple[torch.Tensor, ...]:
        return tuple(table[b.indices.cpu()].cuda() for table in (b.table, b.src))

    facts = _facts("table", gib, rows, 264, "uniform")
    facts["name"] = f"tables of {rows} rows of 256 B and 8 B, pool of {gib:g} GiB, uniform"
    facts["impls"] = [
        Impl("jitkern", "ours", lambda: together),
        Impl("jitkern, one after the other", "peer", lambda: in_turn),
    ]
    return Case(**facts, make=make, outputs=lambda b: (b.output, b.dst), reference=reference)


@dataclass
class TableBuffers:
    """One working set of a table in host memory, which no set writes."""

    table: torch.Tensor
    indices: torch.Tensor
    output: torch.Tensor
    # What the copy engine takes: as many bytes in one piece.
    src: torch.Tensor
    dst: torch.Tensor
    pairs: torch.Tensor


def _table(pool: torch.Tensor, gib: float, rows: int, row_bytes: int, law: str) -> Case:
    table = host_pool.rows_of(pool, gib, row_bytes)

    def make(_: int) -> TableBuffers:
        indices = _rows(table.shape[0], rows, law)
        output = empty_rows(rows, row_bytes, "cuda", dtype=torch.uint8)
        small = indices.to(torch.int32) if table.shape[0] < 1 << 31 else indices
        return TableBuffers(table, small, output, table, output, small)

    def impls() -> Iterator[Impl]:
        yield Impl(
            "jitkern",
            "ours",
            lambda: lambda b: jitkern.indexing(b.table, b.indices, output=b.output),
        )
        yield Impl(UVA, "peer", _triton)
        yield Impl("torch: index_select on the CPU, copy", "peer", lambda: _on_cpu, graph=False)
        yield Impl(MEMCPY, "ceiling", copy_engine, check=False)

    return Case(
        **{**_facts("table", gib, rows, row_bytes, law), "impls": list(impls())},
        make=make,
        outputs=lambda b: (b.output,),
        reference=lambda b: (b.table[b.indices.cpu()].cuda(),),
    )


def _triton() -> Run:
    index = peers.triton().index

    def run_index(b: TableBuffers) -> None:
        words = b.table.view(torch.int32)
        index(words, b.indices, b.output.view(torch.int32), 0, words.shape[0])

    return run_index


def _on_cpu(b: TableBuffers) -> None:
    b.output.copy_(torch.index_select(b.table, 0, b.indices.cpu()))


def _scatters(pool: torch.Tensor, sizes: list[float]) -> Iterator[Case]:
    for gib in (gib for gib in sizes if gib in (0.2, 1, 4, 16, 64)):
        yield _scatter(pool, gib, ROWS, ROW_BYTES)
    for gib in (gib for gib in sizes if gib in (0.2, 16)):
        yield _scatter(pool, gib, 32_768, ROW_BYTES)


def _scatter(pool: torch.Tensor, gib: float, rows: int, row_bytes: int) -> Case:
    dst = host_pool.rows_of(pool, gib, row_bytes)
    src = torch.randint(0, 256, (DEVICE_ROWS, row_bytes), dtype=torch.uint8, device="cuda")

    def make(_: int) -> Buffers:
        # Distinct: of a row that is written twice the content is undefined.
        to = torch.randperm(dst.shape[0], device="cuda")[:rows]
        return Buffers(src, dst, *_pairs(_rows(DEVICE_ROWS, rows, "uniform"), to, dst.shape[0]))

    def written(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.dst[b.pairs64[:, 1].cpu()],)  # a copy: the pool is too large for another

    def erase(b: Buffers) -> None:
        b.dst[b.pairs64[:, 1].cpu()] = 0

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.src[b.pairs64[:, 0]].cpu(),)

    return Case(
        **_facts("scatter", gib, rows, row_bytes, "uniform"),
        make=make,
        outputs=written,
        reference=reference,
        prepare=erase,
    )


def _facts(kind: str, gib: float, rows: int, row_bytes: int, law: str) -> dict[str, Any]:
    return {
        "op": "pools",
        "name": _name(kind, rows, row_bytes, gib, law),
        "params": {
            "kind": kind,
            "rows": rows,
            "row_bytes": row_bytes,
            "pool_gib": gib,
            "law": law,
        },
        "bytes_moved": rows * row_bytes,
        "bytes_note": "bytes that arrive, each row once",
        "impls": list(_impls(kind, row_bytes)) if kind != "table" else [],
        "calls": 3 if rows * row_bytes > 50_000_000 else 10,
    }


def _rows(rows: int, count: int, law: str) -> torch.Tensor:
    """Return random rows of the pool; distinct ones, but by Zipf's law."""
    return host_pool.distinct(rows, count) if law == "uniform" else host_pool.zipf(rows, count)


def _pairs(sources: torch.Tensor, to: torch.Tensor, pool_rows: int) -> list[torch.Tensor]:
    pairs64 = torch.stack([sources, to], 1)
    return [pairs64.to(torch.int32) if pool_rows < 1 << 31 else pairs64, pairs64]


def _impls(kind: str, row_bytes: int) -> Iterator[Impl]:
    """Return the implementations of an op on pairs."""
    op = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter
    by_host = "source" if kind == "gather" else "destination"

    def ours(order: str) -> Run:
        return lambda b: op(b.src, b.dst, b.pairs, order=order)

    yield Impl("jitkern", "ours", lambda: ours("auto"))
    yield Impl(GIVEN, "ours", lambda: ours("given"))
    yield Impl(f"jitkern, by {by_host}", "ours", lambda: ours(by_host))
    if row_bytes % 16 == 0:  # what the peers can
        yield Impl("6 line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4))
        yield Impl("4 loads before stores, full grid", "peer", lambda: rung(LOADS_FIRST))
        if kind == "gather":
            yield Impl(SORT, "peer", _sorted)
    yield Impl(MEMCPY, "ceiling", copy_engine, check=False)


def _sorted() -> Run:
    """Sort the pairs by source on the GPU, as engines do with the ids of a host table."""
    gather = rung(LINE_ALIGNED, 4)

    def run_sorted(b: Buffers) -> None:
        order = b.pairs[:, 0].argsort()
        gather(Buffers(b.src, b.dst, b.pairs[order], b.pairs64))

    return run_sorted
