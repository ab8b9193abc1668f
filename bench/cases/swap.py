"""swap_rows: rows of a cache leave for pinned host memory, others come in their place.

Beside a scatter and a gather, one after the other or at once, and beside both copy engines on rows
in one piece, which no kernel of loads and stores reaches. Bytes are those of both directions.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.cases.common import ours, peer
from bench.cases.pairs import LINK_SIZES, ROW_BYTES, ROWS, SLOTS
from bench.measure import measure
from bench.peers import host_pool

NEEDS_GPU = True
POOLS_GIB = (0.4, 4, 16, 64)  # the smallest has 0.2 for each direction, as the other benchmarks


def run(ctx: Context) -> Iterator[Row]:
    fit = host_pool.sizes(4 if ctx.quick else 96)  # as for `pools`, which takes the same one
    gpu = torch.randint(0, 256, (SLOTS, ROW_BYTES), dtype=torch.uint8, device="cuda")
    for gib in (gib for gib in POOLS_GIB if gib <= max(fit, default=0)):
        host = host_pool.rows_of(host_pool.allocated(fit[-1]), gib, ROW_BYTES)
        for rows in (ROWS,) if ctx.quick or gib > POOLS_GIB[0] else (1, 128, 2048, ROWS):
            case = Case(
                op="swap",
                name=f"{rows} rows of {ROW_BYTES} B, distinct, pool of {gib:g} GiB",
                bytes_moved=2 * rows * ROW_BYTES,
                impls=_impls(rows, gib),
                calls=3 if rows > 100_000 else 20,
                **_job(ctx, host, gpu, rows),
            )
            yield from measure(ctx, case)


def cases(ctx: Context) -> Iterator[Case]:
    on_gpu = ctx.device == "cuda"
    for rows, row_bytes in LINK_SIZES if on_gpu else common.CPU_SIZES:
        slots = max(SLOTS if on_gpu else 0, 2 * rows)
        host = common.random_rows(slots, row_bytes, "cpu", pin=on_gpu).view(torch.uint8)
        gpu = common.random_rows(slots, row_bytes, ctx.device).view(torch.uint8)

        def copies(b: Any, rows: int = rows) -> None:
            b.gpu[:rows].copy_(b.host[:rows], non_blocking=True)
            b.host[:rows].copy_(b.gpu[-rows:], non_blocking=True)

        fields = {"op": "swap", "name": f"{rows} rows of {row_bytes} B"}
        fields |= _job(ctx, host, gpu, rows)
        yield common.host_copy_case(ctx, 2 * rows * row_bytes, _ours, copies, **fields)
    host, gpu = (torch.zeros(64, 656, dtype=torch.uint8, device=d) for d in ("cpu", ctx.device))
    b = _job(ctx, host.pin_memory() if on_gpu else host, gpu, 1)["make"](0)
    one = (b.host, b.gpu, b.triples)
    yield from common.call_cases("swap", jitkern.swap_rows, (*one[:2], b.triples[:0]), one)


def _job(ctx: Context, host: torch.Tensor, gpu: torch.Tensor, rows: int) -> dict[str, Any]:
    staging = torch.empty(rows, gpu.shape[1], dtype=torch.uint8, device=ctx.device)
    new = torch.randint_like(staging, 0, 256)

    def distinct(below: int) -> torch.Tensor:
        return torch.randperm(below, device=ctx.device)[:rows].to(torch.int32)

    def make(_: int) -> SimpleNamespace:
        # Rows are fetched from even places of the pool and go back to odd ones: no other working
        # set writes what one fetches, and each finds it as it was.
        fetch, back = (2 * distinct(len(host) // 2) + odd for odd in (0, 1))
        slots, numbers = distinct(len(gpu)), torch.arange(rows, device=ctx.device)
        return SimpleNamespace(
            host=host,
            gpu=gpu,
            staging=staging,  # a row for each triple, for the peers that need one
            triples=torch.stack([fetch, slots, back], 1),
            incoming=torch.stack([fetch, slots], 1),
            staged=torch.stack([fetch, numbers.to(torch.int32)], 1),
            outgoing=torch.stack([slots, back], 1),
            slots64=slots.long(),
            fetch_cpu=fetch.long().cpu(),
            back_cpu=back.long().cpu(),
        )

    def refill(b: Any) -> None:
        b.gpu[b.slots64] = new
        b.host[b.back_cpu] = 0

    return {
        "make": make,
        # Copies: the pool is too large for another.
        "outputs": lambda b: (b.host[b.back_cpu], b.gpu[b.slots64].cpu()),
        "reference": lambda b: (b.gpu[b.slots64].cpu(), b.host[b.fetch_cpu]),
        "prepare": refill,
    }


def _impls(rows: int, gib: float) -> list[Impl]:
    side = torch.cuda.Stream()

    def on_two_streams(b: Any) -> None:
        """Slots are read while their new rows come, so these wait in a buffer for the last read."""
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            jitkern.d2h_scatter(b.gpu, b.host, b.outgoing, method="sm")
        jitkern.h2d_gather(b.host, b.staging, b.staged, dedup=False, method="sm")
        stream.wait_stream(side)
        b.gpu.index_copy_(0, b.slots64, b.staging)

    def one_by_one(b: Any) -> None:
        jitkern.d2h_scatter(b.gpu, b.host, b.outgoing, method="sm")
        jitkern.h2d_gather(b.host, b.gpu, b.incoming, dedup=False, method="sm")

    def both_engines(b: Any) -> None:
        copy, stream = peers.host().copy_bytes, torch.cuda.current_stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            copy(b.host[rows:], b.gpu, rows * ROW_BYTES)
        copy(b.staging, b.host, rows * ROW_BYTES)
        stream.wait_stream(side)

    impls = [ours(_ours)]
    if gib > POOLS_GIB[0]:
        impls += [ours(lambda b: _ours(b, order="given"), 'jitkern, order="given"')]
    if rows == ROWS:
        impls += [ours(lambda b: _ours(b, num_sms=2), "jitkern, num_sms=2")]
    return [
        *impls,
        peer("d2h_scatter, then h2d_gather", one_by_one),
        peer("both on two streams, by a staging buffer", on_two_streams),
        common.ceiling("cudaMemcpyAsync both ways, contiguous", both_engines),
    ]


def _ours(b: Any, num_sms: int = 4, **how: Any) -> None:
    jitkern.swap_rows(b.host, b.gpu, b.triples, num_sms=num_sms, **how)  # nothing runs beside
