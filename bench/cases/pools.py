"""Host memory of the size that servers keep, 0.2 to 64 GiB: h2d_gather and d2h_scatter.

Random rows of more than 0.5 GiB miss in the translation of the link's addresses. Here are rows as
they come and in the order of the pool, beside the same kernels as peers, the way of those who sort
(sglang, vLLM: the ids, with PyTorch), and the copy engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import empty_rows, ours, peer
from bench.peers import host_pool
from bench.peers.host_rows import ROW_BYTES, ROWS, Buffers, copy_engine, kernel, pairs_job
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.link, peers.host)
NEEDS_GPU = True

DEVICE_ROWS = 600_000
SOME_GIB = (0.2, 4, 16, 64)
# kind, rows, bytes of a row, and the sizes of the pool
CALLS: tuple[tuple[str, int, int, tuple[float, ...]], ...] = (
    ("gather", ROWS, ROW_BYTES, host_pool.POOL_GIB),
    ("gather", 32_768, ROW_BYTES, SOME_GIB),
    ("gather", 2 * ROWS, 256, SOME_GIB),
    ("gather", 2 * ROWS, 8, SOME_GIB),
    ("gather", 2048, ROW_BYTES, (16,)),
    ("gather", 8192, ROW_BYTES, (16,)),
    ("gather", ROWS // 4, 4 * ROW_BYTES, (16,)),
    # Last, as they write the pool.
    ("scatter", ROWS, ROW_BYTES, SOME_GIB),
    ("scatter", 32_768, ROW_BYTES, (0.2, 16)),
)


def run(ctx: Context) -> Iterator[Row]:
    fit = host_pool.sizes(4 if ctx.quick else 96)
    if not fit:
        ctx.say("pools: no memory for a pool, skipped")
        return
    ctx.say(f"pools: a pool of {fit[-1]} GiB")
    pool = host_pool.allocated(fit[-1])
    for kind, rows, row_bytes, wanted in CALLS:
        for gib in (gib for gib in wanted if gib in fit):
            yield from measure(ctx, _case(pool, kind, rows, row_bytes, gib))


def _case(pool: torch.Tensor, kind: str, rows: int, row_bytes: int, gib: float) -> Case:
    host = host_pool.rows_of(pool, gib, row_bytes)
    device = empty_rows(DEVICE_ROWS, row_bytes, "cuda", dtype=torch.uint8)
    if kind == "scatter":
        device.random_()

    src, dst = (host, device) if kind == "gather" else (device, host)
    return Case(
        op="pools",
        name=f"{kind} of {rows} rows of {row_bytes} B, pool of {gib:g} GiB",
        params={"kind": kind, "rows": rows, "row_bytes": row_bytes, "pool_gib": gib},
        bytes_moved=rows * row_bytes,
        impls=_impls(kind, row_bytes),
        **pairs_job(src, dst, rows),
        calls=3 if rows * row_bytes > 50_000_000 else 10,
    )


def _impls(kind: str, row_bytes: int) -> list[Impl]:
    op: Any = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter
    by = "jitkern, by source" if kind == "gather" else "jitkern, by destination"

    def by_order(order: str, name: str) -> Impl:  # nothing runs beside
        return ours(lambda b: op(b.src, b.dst, b.pairs, order=order, method="sm"), name)

    def sorted_first(b: Buffers) -> None:
        """Sort the pairs by source on the GPU, as engines do with the ids of a host table."""
        pairs = b.pairs[b.pairs[:, 0].argsort()]
        peers.link().gather(True, b.src, b.dst, pairs, 4)

    impls = [by_order("auto", "jitkern"), by_order("given", "jitkern, as they come")]
    impls += [by_order("host", by)]
    if row_bytes % 16 == 0:  # what the peers can
        impls += [kernel("line-aligned", 4), kernel("loads before stores")]
        if kind == "gather":
            impls += [peer("torch.argsort, then line-aligned, 4 SMs", sorted_first)]
    return [*impls, copy_engine()]
