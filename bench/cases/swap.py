"""swap_rows: rows of a cache leave for pinned host memory, others come in their place.

Against what there was before: a scatter and a gather, one after the other or at once, and both
copy engines on rows in one piece, which no kernel of loads and stores reaches: 100.8 GB/s of an
H200's link, both directions together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import Figures, Goal, at_least
from bench.peers import host_pool
from bench.peers.host_rows import ROW_BYTES, ROWS
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.ladder,)

BOTH_ENGINES = "cudaMemcpyAsync both ways, contiguous"
GIVEN = 'jitkern, order="given"'
ONE_BY_ONE = "d2h_scatter, then h2d_gather"
POOLS_GIB = (0.4, 4, 16, 64)  # the smallest has 0.2 for each direction, as the other benchmarks
SLOTS = 300_000


@dataclass
class Buffers:
    """One working set. Rows are fetched from even places of the pool and go back to odd ones.

    So no other set writes what one fetches, and each finds it as it was.
    """

    host: torch.Tensor
    gpu: torch.Tensor
    staging: torch.Tensor  # on the GPU, a row for each triple, for the peers that need one
    triples: torch.Tensor  # int32 [rows, 3]

    def __post_init__(self) -> None:
        fetch, slots, back = self.triples.unbind(1)
        numbers = torch.arange(len(fetch), dtype=torch.int32, device=fetch.device)
        self.incoming = torch.stack([fetch, slots], 1)
        self.staged = torch.stack([fetch, numbers], 1)
        self.outgoing = torch.stack([slots, back], 1)
        self.slots64 = slots.long()
        self.fetch_cpu, self.back_cpu = fetch.long().cpu(), back.long().cpu()


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("swap: needs a GPU, skipped")
        return
    fit = host_pool.sizes(4 if ctx.quick else 96)  # as for `pools`, which takes the same one
    if not fit or fit[-1] < POOLS_GIB[0]:
        ctx.say("swap: no memory for a pool, skipped")
        return
    pool = host_pool.allocated(fit[-1])
    for gib in (gib for gib in POOLS_GIB if gib <= fit[-1]):
        for rows in (ROWS,) if ctx.quick or gib > POOLS_GIB[0] else (1, 128, 2048, ROWS):
            yield from measure(ctx, _case(ctx, pool, gib, rows))


def goals(f: Figures) -> Iterator[Goal]:
    case = _name(ROWS, POOLS_GIB[0])
    got = f.speed("swap", case, "jitkern", BOTH_ENGINES)
    yield from at_least(f"swap, {case}: of both copy engines", got, 0.76)
    got = f.speed("swap", case, "jitkern", ONE_BY_ONE)
    yield from at_least(f"swap, {case}: of {ONE_BY_ONE}", got, 1.3)
    for gib in (4, 16):
        case = _name(ROWS, gib)
        for other, wanted in ((GIVEN, 2.5), (ONE_BY_ONE, 1.3)):
            got = f.speed("swap", case, "jitkern", other)
            yield from at_least(f"swap, {case}: of {other}", got, wanted)


def _name(rows: int, gib: float) -> str:
    return f"{rows} rows of {ROW_BYTES} B, distinct, pool of {gib:g} GiB"


def _case(ctx: Context, pool: torch.Tensor, gib: float, rows: int) -> Case:
    host = host_pool.rows_of(pool, gib, ROW_BYTES)
    gpu = torch.randint(0, 256, (SLOTS, ROW_BYTES), dtype=torch.uint8, device="cuda")
    staging = torch.empty(rows, ROW_BYTES, dtype=torch.uint8, device="cuda")
    new = torch.randint_like(staging, 0, 256)

    def make(_: int) -> Buffers:
        fetch, back = (2 * _distinct(host.shape[0] // 2, rows) + odd for odd in (0, 1))
        triples = torch.stack([fetch, _distinct(SLOTS, rows), back], 1).to(torch.int32)
        return Buffers(host, gpu, staging, triples)

    def refill(b: Buffers) -> None:
        b.gpu[b.slots64] = new
        b.host[b.back_cpu] = 0

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return b.gpu[b.slots64].cpu(), b.host[b.fetch_cpu]

    return Case(
        op="swap",
        name=_name(rows, gib),
        params={"rows": rows, "row_bytes": ROW_BYTES, "pool_gib": gib, "slots": SLOTS},
        bytes_moved=2 * rows * ROW_BYTES,
        bytes_note="over the link, both directions",
        make=make,
        # Copies: the pool is too large for another.
        outputs=lambda b: (b.host[b.back_cpu], b.gpu[b.slots64].cpu()),
        reference=reference,
        prepare=refill,
        impls=list(_impls(ctx, rows, gib)),
        calls=3 if rows > 100_000 else 20,
    )


def _distinct(below: int, count: int) -> torch.Tensor:
    return torch.randperm(below, device="cuda")[:count]


def _impls(ctx: Context, rows: int, gib: float) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours())
    if gib > POOLS_GIB[0]:
        yield Impl(GIVEN, "ours", lambda: _ours(order="given"))
    if rows == ROWS and not ctx.quick:
        for sms in (1, 2, 4, 8, 16):
            yield Impl(f"jitkern, num_sms={sms}", "ours", lambda sms=sms: _ours(num_sms=sms))
    yield Impl(ONE_BY_ONE, "peer", lambda: _one_by_one)
    yield Impl("both on two streams, by a staging buffer", "peer", _on_two_streams)
    yield Impl("torch, index on the CPU", "peer", lambda: _torch, graph=False)
    yield Impl(BOTH_ENGINES, "ceiling", _both_engines, check=False)


def _ours(**how: Any) -> Run:
    return lambda b: jitkern.swap_rows(b.host, b.gpu, b.triples, **how)


def _one_by_one(b: Buffers) -> None:
    jitkern.d2h_scatter(b.gpu, b.host, b.outgoing)
    jitkern.h2d_gather(b.host, b.gpu, b.incoming, dedup=False)


def _on_two_streams() -> Run:
    """Slots are read while their new rows come, so these wait in a buffer for the last read."""
    side = torch.cuda.Stream()

    def both(b: Buffers) -> None:
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            jitkern.d2h_scatter(b.gpu, b.host, b.outgoing)
        jitkern.h2d_gather(b.host, b.staging, b.staged, dedup=False)
        stream.wait_stream(side)
        b.gpu.index_copy_(0, b.slots64, b.staging)

    return both


def _torch(b: Buffers) -> None:
    b.host[b.back_cpu] = b.gpu[b.slots64].cpu()
    b.gpu[b.slots64] = b.host[b.fetch_cpu].cuda()


def _both_engines() -> Run:
    copy = peers.ladder().copy_engine
    side = torch.cuda.Stream()

    def both(b: Buffers) -> None:
        count, stream = len(b.triples), torch.cuda.current_stream()
        num_bytes = count * ROW_BYTES
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            copy(b.gpu, b.host[count:], num_bytes)
        copy(b.host, b.staging, num_bytes)
        stream.wait_stream(side)

    return both
