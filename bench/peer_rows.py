"""peer's rows: out of one pool to all ranks and back, and a GEMM beside them.

Beside each rank that fetches all of them over its own link, all at once as engines do, and beside
one link that does so alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench.peers import host_pool
from bench.ranks import Calls, Ranks, timed
from jitkern.bench.case import Row, error_row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Timing

GIB = 1 << 30
ROW_BYTES, ROWS, CPU_ROWS = 656, 262_144, 4096
POOL_GIB, CPU_POOL_GIB = (0.25, 16, 64), (0.01,)
CALLS, CPU_CALLS = 10, 2
GEMM_N, GEMMS, WINDOWS = 8192, 12, 5
GATHERS_A_RANK = 15  # those of a window outlast its GEMMs; more links are done sooner

OURS = "jitkern"
EACH, ALONE = "each rank by itself, all at once", "one rank, by itself and alone"
NO_ROWS = "nothing"


def rows_case(op: str, count: int, gib: float, where: str) -> str:
    return f"{op}, {count:,} rows of {ROW_BYTES} B, a pool of {gib:g} GiB, {where}"


def beside_case(where: str) -> str:
    return f"GEMM of {GEMM_N} beside rows that come in, {where}"


def moved_rows(ranks: Ranks, comm: Any, quick: bool) -> Iterator[Row]:
    """Measure with each size of pool, up to what the machine has; all ranks alike."""
    from jitkern.comm import PeerMemory

    on_gpu = ranks.device.type == "cuda"
    count = ROWS if on_gpu else CPU_ROWS
    peers = PeerMemory(count * ROW_BYTES, ranks.cpu_group)
    caches = [peers.remote(rank, (count, ROW_BYTES), torch.uint8) for rank in range(ranks.size)]
    sizes = POOL_GIB[:1] if quick else POOL_GIB
    for gib in sizes if on_gpu else CPU_POOL_GIB:
        case = rows_case("peer_gather", count, gib, ranks.where)
        # Rank 0 says: what Linux has free differs from one moment to the next.
        lacks = ranks.first_text(host_pool.lacks(gib) if ranks.rank == 0 else "")
        if lacks:
            yield Row("peer", case, OURS, "ours", note=lacks)
            return
        pool, error = _pool(ranks, gib)
        error = ranks.first_text(error)
        if error:
            yield error_row("peer", case, OURS, "ours", MemoryError(error))
            return
        yield from _Moved(ranks, comm, pool.tensor(), caches, gib).rows()
        ranks.barrier()
        pool.close()


def _pool(ranks: Ranks, gib: float) -> tuple[Any, str]:
    """Return the pool of all ranks, or what is wrong."""
    from jitkern.offload import PinnedPool, Share

    name = f"jitkern-bench-{os.environ['MASTER_PORT']}-{gib:g}"  # no other run's
    share = Share(name, ranks.rank, ranks.size, timeout_s=120)
    try:
        with host_pool.trusted():
            return PinnedPool(int(gib * GIB), share=share, progress=False), ""
    except Exception as error:  # the smaller pools' rows are kept
        return None, f"rank {ranks.rank}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Moved:
    """Rows of one pool: `caches` are the ranks' memory for them."""

    ranks: Ranks
    comm: Any
    pool: torch.Tensor
    caches: list[torch.Tensor]
    gib: float

    def rows(self) -> Iterator[Row]:
        ranks, own = self.ranks, self.caches[self.ranks.rank]
        on_gpu, count = ranks.device.type == "cuda", len(own)
        source = host_pool.rows_of(self.pool, self.gib, ROW_BYTES)
        torch.manual_seed(1)  # the same pairs on all ranks
        chosen = torch.randperm(len(source))[:count] if on_gpu else torch.arange(count)
        to = torch.randperm(count)
        pairs = torch.stack([chosen, to], 1).to(ranks.device)
        back = pairs.flip(-1).contiguous()
        if ranks.rank == 0:
            source[chosen, :8] = (chosen[:, None] >> torch.arange(8)).to(torch.uint8)
        gathers, scatters = self.gathers(source, pairs), self.scatters(source, back)
        self.check(gathers, scatters, source, chosen, to)
        for op, calls in (("peer_gather", gathers), ("peer_scatter", scatters)):
            case = rows_case(op, count, self.gib, ranks.where)
            rows = [
                Row("peer", case, name, role, bytes_moved=count * ROW_BYTES)
                for name, (role, _) in calls.items()
            ]
            for row in rows:
                row.params = {"ranks": ranks.size, "gib": self.gib}
                row.bytes_note = "of the rows, once, whoever brings them"
            yield from timed(ranks, rows, calls, CALLS if on_gpu else CPU_CALLS)
        if on_gpu and self.gib == POOL_GIB[0]:
            yield from _beside_rows(ranks, gathers)

    def gathers(self, source: torch.Tensor, pairs: torch.Tensor) -> Calls:
        from jitkern.comm import peer_gather

        first = torch.empty_like(self.caches[self.ranks.rank])  # of this rank's own

        def itself() -> None:
            jitkern.h2d_gather(source, first, pairs)

        return {
            OURS: ("ours", lambda: peer_gather(source, self.caches, pairs, self.comm)),
            EACH: ("peer", itself),
            ALONE: ("peer", self.alone(itself)),
        }

    def scatters(self, source: torch.Tensor, pairs: torch.Tensor) -> Calls:
        from jitkern.comm import peer_scatter

        own = self.caches[self.ranks.rank]

        def itself() -> None:
            jitkern.d2h_scatter(own, source, pairs)

        return {
            OURS: ("ours", lambda: peer_scatter(own, source, pairs, self.comm)),
            ALONE: ("peer", self.alone(itself)),
        }

    def alone(self, call: Callable[[], object]) -> Callable[[], object]:
        spacer = torch.zeros(1, device=self.ranks.device)
        return call if self.ranks.rank == 0 else spacer.zero_

    def check(
        self,
        gathers: Calls,
        scatters: Calls,
        source: torch.Tensor,
        chosen: torch.Tensor,
        to: torch.Tensor,
    ) -> None:
        """Raise on all ranks unless each has the rows, and the pool has what all send back."""
        ranks, own = self.ranks, self.caches[self.ranks.rank]

        def same() -> bool:
            return torch.equal(own[to.to(own.device)].cpu(), source[chosen])

        own.fill_(0xA5)
        ranks.barrier()
        gathers[OURS][1]()
        ranks.barrier()
        wrong = "" if same() else f"rank {ranks.rank}: peer_gather brings other rows"
        own.bitwise_not_()
        ranks.barrier()
        scatters[OURS][1]()
        ranks.barrier()
        wrong = wrong or ("" if same() else f"rank {ranks.rank}: peer_scatter leaves other rows")
        wrong = ranks.first_text(wrong)
        if wrong:
            raise RuntimeError(f"peer: {wrong}")


def _beside_rows(ranks: Ranks, calls: Calls) -> Iterator[Row]:
    """Time a GEMM on this rank while rows come in on all, or nothing does."""
    a, b = (torch.randn(GEMM_N, GEMM_N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    front, back = torch.cuda.Stream(), torch.cuda.Stream()
    too_short: list[str] = []

    def window_ms(call: Callable[[], object] | None) -> float:
        tic, toc, started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        ranks.barrier()
        if call is not None:
            with torch.cuda.stream(back):
                call()
                started.record()
                for _ in range(GATHERS_A_RANK * ranks.size):
                    call()
                ended.record()
            front.wait_event(started)
        with torch.cuda.stream(front):
            tic.record()
            for _ in range(GEMMS):
                torch.mm(a, b, out=out)
            toc.record()
        ranks.barrier()
        if call is not None and toc.elapsed_time(ended) < 0:
            too_short.append("the rows had come before the GEMMs ended")
        return tic.elapsed_time(toc) / GEMMS

    for name, call in ((NO_ROWS, None), (OURS, calls[OURS][1]), (EACH, calls[EACH][1])):
        window_ms(call)
        too_short.clear()
        samples = tuple(window_ms(call) for _ in range(WINDOWS))
        role = "floor" if call is None else calls[name][0]
        row = Row("peer", beside_case(ranks.where), name, role, params={"ranks": ranks.size})
        if too_short:
            row.error = too_short[0]
        else:
            fill(row, Timing(samples))
        yield row
