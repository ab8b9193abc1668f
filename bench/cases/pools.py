"""Host memory of the size that servers keep, 0.2 to 64 GiB: h2d_gather, d2h_scatter, indexing.

Random rows of more than 0.5 GiB miss in the translation of the link's addresses. Here are rows as
they come and in the order of the pool, uniform and by Zipf's law, beside the same kernels as peers,
the way of those who sort (sglang, vLLM: the ids, with PyTorch), and the copy engine. Tables of
`indexing` are read beside a kernel that reads them where they lie, as engines do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import MEMCPY, empty_rows, lacks_gpu
from bench.peers import host_pool
from bench.peers.host_rows import LINE_ALIGNED, LOADS_FIRST, ROW_BYTES, ROWS, copy_engine, rung
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.ladder,)
PLOTS = ("pools",)

TOKEN_ROWS = 24 * 1024  # of an n-gram table: 24 rows for each of 1,024 tokens
DEVICE_ROWS = 600_000
UNIFORM, ZIPF = "uniform", "Zipf(1.1)"
SOME_GIB = (0.2, 4, 16, 64)
# kind, rows, bytes of a row, law, and the sizes of the pool
CALLS: tuple[tuple[str, int, int, str, tuple[float, ...]], ...] = (
    ("gather", ROWS, ROW_BYTES, UNIFORM, host_pool.POOL_GIB),
    ("gather", 32_768, ROW_BYTES, UNIFORM, SOME_GIB),
    ("gather", ROWS, ROW_BYTES, ZIPF, SOME_GIB),
    ("gather", 2 * ROWS, 256, UNIFORM, SOME_GIB),
    ("gather", 2 * ROWS, 8, UNIFORM, SOME_GIB),
    ("gather", 2048, ROW_BYTES, UNIFORM, (16,)),
    ("gather", 8192, ROW_BYTES, UNIFORM, (16,)),
    ("gather", ROWS // 4, 4 * ROW_BYTES, UNIFORM, (16,)),
    ("table", TOKEN_ROWS, 256, UNIFORM, SOME_GIB),
    ("table", 2 * ROWS, 256, UNIFORM, SOME_GIB),
    ("table", TOKEN_ROWS, 256, ZIPF, SOME_GIB),
    ("table", 2 * ROWS, 256, ZIPF, SOME_GIB),
    ("table", 24, 256, UNIFORM, (16,)),
    # Last, as they write the pool.
    ("scatter", ROWS, ROW_BYTES, UNIFORM, (0.2, 1, 4, 16, 64)),
    ("scatter", 32_768, ROW_BYTES, UNIFORM, (0.2, 16)),
)


@dataclass
class Buffers:
    """One working set; `src` or `dst` is the pool. Of a table `pairs` are its indices."""

    src: torch.Tensor
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 where the rows are few enough, else int64
    sources: torch.Tensor
    targets: torch.Tensor


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "pools"):
        return
    sizes = host_pool.sizes(4 if ctx.quick else 96)
    if not sizes:
        ctx.say("pools: no memory for a pool, skipped")
        return
    ctx.say(f"pools: a pool of {sizes[-1]} GiB")
    pool = host_pool.allocated(sizes[-1])
    for kind, rows, row_bytes, law, wanted in CALLS:
        for gib in wanted:
            if gib in sizes:
                yield from measure(ctx, _case(pool, kind, rows, row_bytes, law, gib))


def _case(pool: torch.Tensor, kind: str, rows: int, row_bytes: int, law: str, gib: float) -> Case:
    host = host_pool.rows_of(pool, gib, row_bytes)
    count = rows if kind == "table" else DEVICE_ROWS
    device = empty_rows(count, row_bytes, "cuda", dtype=torch.uint8)
    if kind == "scatter":
        device.random_()
    draw = host_pool.distinct if law == UNIFORM else host_pool.zipf

    def make(_: int) -> Buffers:
        # Distinct where rows are written: of one that is written twice the content is undefined.
        numbers, slots = draw(len(host), rows), torch.randperm(count, device="cuda")[:rows]
        narrow = torch.int32 if len(host) < 1 << 31 else torch.int64
        if kind == "table":
            output = torch.empty_like(device)
            slots = torch.arange(rows, device="cuda")
            return Buffers(host, output, numbers.to(narrow), numbers, slots)
        src, dst = (host, device) if kind == "gather" else (device, host)
        sources, targets = (numbers, slots) if kind == "gather" else (slots, numbers)
        pairs = torch.stack([sources, targets], 1).to(narrow)
        return Buffers(src, dst, pairs, sources, targets)

    def written(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.dst[b.targets.to(b.dst.device)],)  # a copy: the pool is too large for another

    def erase(b: Buffers) -> None:
        b.dst[b.targets.to(b.dst.device)] = 0

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.src[b.sources.to(b.src.device)].to(b.dst.device),)

    return Case(
        op="pools",
        name=f"{kind} of {rows} rows of {row_bytes} B, pool of {gib:g} GiB, {law}",
        params={
            "kind": kind,
            "rows": rows,
            "row_bytes": row_bytes,
            "pool_gib": gib,
            "law": law,
        },
        bytes_moved=rows * row_bytes,
        bytes_note="bytes that arrive, each row once",
        impls=list(_of_a_table() if kind == "table" else _of_pairs(kind, row_bytes)),
        make=make,
        outputs=written,
        reference=reference,
        prepare=erase,
        calls=3 if rows * row_bytes > 50_000_000 else 10,
    )


def _of_way(op: Any, order: str) -> Run:
    return lambda b: op(b.src, b.dst, b.pairs, order=order, method="sm")  # nothing runs beside


def _of_pairs(kind: str, row_bytes: int) -> Iterator[Impl]:
    op: Any = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter
    side = "source" if kind == "gather" else "destination"
    for name, order in (
        ("jitkern", "auto"),
        ("jitkern, as they come", "given"),
        (f"jitkern, by {side}", "host"),
    ):
        yield Impl(name, "ours", partial(_of_way, op, order))
    if row_bytes % 16 == 0:  # what the peers can
        yield Impl("6 line-aligned, 4 SMs", "peer", lambda: rung(LINE_ALIGNED, 4))
        yield Impl("4 loads before stores, full grid", "peer", lambda: rung(LOADS_FIRST))
        if kind == "gather":
            yield Impl("torch.argsort, then 6 line-aligned, 4 SMs", "peer", _sorted)
    yield Impl(MEMCPY, "ceiling", copy_engine, check=False)


def _sorted() -> Run:
    """Sort the pairs by source on the GPU, as engines do with the ids of a host table."""
    gather = rung(LINE_ALIGNED, 4)

    def run_sorted(b: Buffers) -> None:
        order = b.pairs[:, 0].argsort()
        gather(Buffers(b.src, b.dst, b.pairs[order], b.sources, b.targets))

    return run_sorted


def _of_a_table() -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _indexing)
    yield Impl("triton, rows where they lie", "peer", _triton)
    yield Impl("torch: index_select on the CPU, copy", "peer", lambda: _on_cpu, graph=False)
    yield Impl(MEMCPY, "ceiling", copy_engine, check=False)


def _indexing(b: Buffers) -> None:
    jitkern.indexing(b.src, b.pairs, output=b.dst)


def _triton() -> Run:
    index = peers.triton().index

    def run_index(b: Buffers) -> None:
        words = b.src.view(torch.int32)
        index(words, b.pairs, b.dst.view(torch.int32), 0, words.shape[0])

    return run_index


def _on_cpu(b: Buffers) -> None:
    b.dst.copy_(torch.index_select(b.src, 0, b.pairs.cpu()))
