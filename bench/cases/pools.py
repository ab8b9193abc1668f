"""Host memory of the size that servers keep, 0.2 to 64 GiB: h2d_gather and d2h_scatter.

Random rows of more than 0.5 GiB miss in the translation of the link's addresses. Here are rows as
they come and in the order of the pool, beside the same kernels as peers, ids sorted by PyTorch
first (as sglang and vLLM do), and the copy engine.
"""

from collections.abc import Iterator
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Context, Impl, Row
from bench.cases import pairs
from bench.cases.common import ours, peer, random_rows
from bench.cases.pairs import ROW_BYTES, ROWS
from bench.measure import measure
from bench.peers import host_pool

NEEDS_GPU = True

DEVICE_ROWS = 600_000
SOME_GIB = (0.2, 4, 16, 64)
# kind, rows, bytes of a row, and the sizes of the pool
CALLS: tuple[tuple[str, int, int, tuple[float, ...]], ...] = (
    ("gather", ROWS, ROW_BYTES, host_pool.POOL_GIB),
    ("gather", 32_768, ROW_BYTES, SOME_GIB),
    ("gather", 2 * ROWS, 256, SOME_GIB),
    ("gather", 2 * ROWS, 8, SOME_GIB),
    # Last, as they write the pool.
    ("scatter", ROWS, ROW_BYTES, SOME_GIB),
    ("scatter", 32_768, ROW_BYTES, (0.2, 16)),
)


def run(ctx: Context) -> Iterator[Row]:
    fit = host_pool.sizes(4 if ctx.quick else 96)
    for kind, rows, row_bytes, wanted in CALLS:
        for gib in (gib for gib in wanted if gib in fit):
            host = host_pool.rows_of(host_pool.allocated(fit[-1]), gib, row_bytes)
            device = random_rows(DEVICE_ROWS, row_bytes, "cuda").view(torch.uint8)
            sides = (host, device) if kind == "gather" else (device, host)
            name = f"{kind} of {rows} rows of {row_bytes} B, pool of {gib:g} GiB"
            params = {"kind": kind, "rows": rows, "row_bytes": row_bytes, "pool_gib": gib}
            case = pairs.case_of("pools", name, sides, rows, _impls(kind, row_bytes), params)
            yield from measure(ctx, case)


def _impls(kind: str, row_bytes: int) -> list[Impl]:
    op: Any = jitkern.h2d_gather if kind == "gather" else jitkern.d2h_scatter

    def by_order(order: str, name: str) -> Impl:  # nothing runs beside
        return ours(lambda b: op(b.src, b.dst, b.pairs, order=order, method="sm"), name)

    def sorted_first(b: Any) -> None:
        """Sort the pairs by source on the GPU, as engines do with the ids of a host table."""
        peers.link().gather(True, b.src, b.dst, b.pairs[b.pairs[:, 0].argsort()], 4)

    impls = [by_order("auto", "jitkern"), by_order("given", "jitkern, as they come")]
    if row_bytes % 16 == 0:  # what the peers can
        impls += [pairs.kernel("line-aligned", 4), pairs.kernel("loads before stores")]
        if kind == "gather":
            impls += [peer("torch.argsort, then line-aligned, 4 SMs", sorted_first)]
    return [*impls, pairs.copy_engine()]
