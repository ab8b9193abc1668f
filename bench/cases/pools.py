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
from bench.cases.common import empty_rows, ours, peer
from bench.peers import host_pool
from bench.peers.host_rows import LINE_ALIGNED, ROW_BYTES, ROWS, copy_engine, rung
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.ladder,)
NEEDS_GPU = True

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
    pairs: torch.Tensor  # int32 if the rows are few enough, else int64
    sources: torch.Tensor
    targets: torch.Tensor


def run(ctx: Context) -> Iterator[Row]:
    fit = host_pool.sizes(4 if ctx.quick else 96)
    if not fit:
        ctx.say("pools: no memory for a pool, skipped")
        return
    ctx.say(f"pools: a pool of {fit[-1]} GiB")
    pool = host_pool.allocated(fit[-1])
    for kind, rows, row_bytes, law, wanted in CALLS:
        for gib in (gib for gib in wanted if gib in fit):
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
            slots = torch.arange(rows, device="cuda")
            return Buffers(host, torch.empty_like(device), numbers.to(narrow), numbers, slots)
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
        params={"kind": kind, "rows": rows, "row_bytes": row_bytes, "pool_gib": gib, "law": law},
        bytes_moved=rows * row_bytes,
        impls=_of_a_table() if kind == "table" else _of_pairs(kind, row_bytes),
        make=make,
        outputs=written,
        reference=reference,
        prepare=erase,
        calls=3 if rows * row_bytes > 50_000_000 else 10,
    )


def _of_pairs(kind: str, row_bytes: int) -> list[Impl]:
    op: Any = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter
    by = "jitkern, by source" if kind == "gather" else "jitkern, by destination"
    aligned = rung("6 line-aligned, 4 SMs", 4)

    def by_order(order: str, name: str) -> Impl:  # nothing runs beside
        return ours(lambda b: op(b.src, b.dst, b.pairs, order=order, method="sm"), name)

    def sorted_first(b: Buffers) -> None:
        """Sort the pairs by source on the GPU, as engines do with the ids of a host table."""
        pairs = b.pairs[b.pairs[:, 0].argsort()]
        peers.ladder().gather(LINE_ALIGNED, b.src, b.dst, pairs, 4)

    impls = [by_order("auto", "jitkern"), by_order("given", "jitkern, as they come")]
    impls += [by_order("host", by)]
    if row_bytes % 16 == 0:  # what the peers can
        impls += [aligned, rung("4 loads before stores, full grid")]
        if kind == "gather":
            impls += [peer("torch.argsort, then 6 line-aligned, 4 SMs", sorted_first)]
    return [*impls, copy_engine()]


def _of_a_table() -> list[Impl]:
    def triton(b: Buffers) -> None:
        words = b.src.view(torch.int32), b.dst.view(torch.int32)
        peers.triton().index(words[0], b.pairs, words[1], 0, words[0].shape[0])

    def on_cpu(b: Buffers) -> None:
        b.dst.copy_(torch.index_select(b.src, 0, b.pairs.cpu()))

    return [
        ours(lambda b: jitkern.indexing(b.src, b.pairs, output=b.dst)),
        peer("triton, rows where they lie", triton),
        peer("torch: index_select on the CPU, copy", on_cpu, graph=False),
        copy_engine(),
    ]
