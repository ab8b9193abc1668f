"""peer: memory of other ranks. Small sums, an embedding and rows of one pool, without NCCL.

A process a GPU, of one host; without GPUs two processes. Graphs and small kernels as in `comm`.
Rows come out of one pool of all ranks: beside each rank that fetches all of them over its own link,
all at once as engines do, and beside one link that does so alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import jitkern
from bench import ranks
from bench.goals import Figures, Goal, at_least, at_most
from bench.peers import host_pool
from bench.ranks import Calls, Ranks, size_text, spaced, timed
from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Timing, host_ms

PEERS = ()

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BYTES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
CALLS, FEW_CALLS = 50, 5
HOST_CALLS, HOST_ROUNDS = 30, 101  # fewer than wait for the GPU
VOCAB, HIDDEN = 131_072, 4096
CPU_VOCAB, CPU_HIDDEN = 4096, 1024
TOKENS = (1, 1024, 16_384)
ROW_BYTES, ROWS, CPU_ROWS = 656, 262_144, 4096
POOL_GIB = (0.25, 16, 64)

OURS, ONE_SHOT, TWO_SHOT = "jitkern", "jitkern, one shot", "jitkern, two shots"
NCCL = "torch.distributed"
SYMMETRIC = "torch symmetric memory, one shot"
SYMMETRIC_TWO = "torch symmetric memory, two shots"
USUAL = "mask, F.embedding, all_reduce"
EACH, ALONE = "each rank by itself, all at once", "one rank, by itself and alone"
NO_ROWS = "nothing"
GEMM_N, GEMMS, GATHERS, WINDOWS = 8192, 12, 30, 5  # the gathers of a window outlast its GEMMs

# By number of GPUs, as the issue of this part has them.
OF_NCCL = {
    2: {8 * KIB: 0.28, 128 * KIB: 0.32, MIB: 0.42},
    4: {8 * KIB: 0.32, 128 * KIB: 0.4, MIB: 0.6},
}
OF_SYMMETRIC = {2: {8 * KIB: 0.45, MIB: 0.7}, 4: {8 * KIB: 0.5, MIB: 0.8}}
OF_USUAL = {2: {1: 7.0, 1024: 4.0, 16_384: 3.3}, 4: {1: 9.0, 1024: 2.8, 16_384: 2.4}}
OF_ALONE = {2: {0.25: 1.9, 16: 1.95, 64: 1.95}, 4: {0.25: 3.6, 16: 3.8, 64: 3.8}}


def run(ctx: Context) -> Iterator[Row]:
    for size in ranks.sizes(ctx):
        ctx.say(f"peer: {size} ranks")
        try:
            yield from ranks.rows_of("peer", ctx, size)
        except RuntimeError as error:
            yield error_row("peer", f"{size} ranks", OURS, "ours", error)


def goals(f: Figures) -> Iterator[Goal]:
    for size in (2, 4):
        where = f"{size} GPUs"

        def of(case: str, other: str) -> float | None:
            ours, theirs = f.us("peer", case, OURS), f.us("peer", case, other)
            return None if ours is None or theirs is None else ours / theirs

        for num_bytes in BYTES:
            case = _sum_case(num_bytes, where)
            for other, wanted in ((NCCL, OF_NCCL), (SYMMETRIC, OF_SYMMETRIC)):
                most = wanted[size].get(num_bytes, 1.0)
                got = of(case, other)
                if other == SYMMETRIC and got is not None:
                    got = max(got, of(case, SYMMETRIC_TWO) or 0.0)
                if got is not None:
                    yield from at_most(f"peer, {case}: time, of {other}", got, most)
        host = f.us("peer", _host_case(where), OURS)
        if host is not None:
            yield from at_most(f"peer, {_host_case(where)}", host, 6.0, "us")
        for tokens, least in OF_USUAL[size].items():
            case = _embedding_case(tokens, HIDDEN, where)
            yield from at_least(f"peer, {case}: {USUAL}, of ours", _inverse(of(case, USUAL)), least)
        for gib, least in OF_ALONE[size].items():
            case = _rows_case("peer_gather", ROWS, gib, where)
            yield from at_least(f"peer, {case}: of one link", _inverse(of(case, ALONE)), least)
        beside = of(_beside_case(where), EACH)
        if beside is not None:
            yield from at_most(f"peer, {_beside_case(where)}: time, of {EACH}", beside, 1.0)


def _inverse(ratio: float | None) -> float | None:
    return None if ratio is None else 1 / ratio


def _sum_case(num_bytes: int, where: str) -> str:
    return f"all_reduce, {size_text(num_bytes)} bf16, {where}"


def _host_case(where: str) -> str:
    return f"all_reduce, 8 KB bf16, {where}, host time"


def _embedding_case(tokens: int, hidden: int, where: str) -> str:
    return f"TPEmbedding, {tokens:,} tokens of {hidden:,} bf16, {where}"


def _rows_case(op: str, count: int, gib: float, where: str) -> str:
    return f"{op}, {count:,} rows of {ROW_BYTES} B, a pool of {gib:g} GiB, {where}"


def _beside_case(where: str) -> str:
    return f"GEMM of {GEMM_N} beside rows that come in, {where}"


# -- in each rank ----------------------------------------------------------------------------------


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """Measure all of it, in step with the other ranks."""
    inner = _inner(ranks)
    on_gpu = ranks.device.type == "cuda"
    with torch.inference_mode():
        sums = _Sums(ranks, inner)
        for num_bytes in QUICK_BYTES if quick or not on_gpu else BYTES:
            yield from sums.rows(num_bytes)
        yield from sums.host_rows()
        yield from _embedding_rows(ranks, inner, (1, 1024) if quick or not on_gpu else TOKENS)
        free = host_pool.sizes(1 if quick else 64) if on_gpu else [0.01]
        pools = [gib for gib in POOL_GIB if free and gib <= max(free)] if on_gpu else [0.01]
        yield from _moved_rows(ranks, sums.ours, pools)


def _inner(ranks: Ranks) -> Any:
    from jitkern.comm import TorchCommunicator, init_pynccl

    if ranks.device.type == "cpu":
        return TorchCommunicator()
    return init_pynccl(tp_rank=ranks.rank, tp_size=ranks.size, tp_cpu_group=ranks.cpu_group)


class _Sums:
    """Everything that sums small tensors."""

    def __init__(self, ranks: Ranks, inner: Any) -> None:
        from jitkern.comm import PeerCommunicator

        self.ranks = ranks
        # Also where NCCL would take over: what is measured is where that should be.
        self.ours = PeerCommunicator(inner, ranks.cpu_group, max_bytes=BYTES[-1])
        self.symmetric = _symmetric(ranks, BYTES[-1])

    def calls(self, x: torch.Tensor) -> dict[str, tuple[str, Callable[[], object]]]:
        reducer = self.ours.reducer
        assert reducer is not None
        found: dict[str, tuple[str, Callable[[], object]]] = {
            OURS: ("ours", lambda: self.ours.all_reduce(x)),
            ONE_SHOT: ("ours", lambda: reducer.all_reduce(x, algorithm="one_shot")),
            TWO_SHOT: ("ours", lambda: reducer.all_reduce(x, algorithm="two_shot")),
            NCCL: ("peer", lambda: dist.all_reduce(x)),
        }
        for name, make in self.symmetric.items():
            found[name] = ("peer", make(x.numel()))
        return found

    def rows(self, num_bytes: int) -> list[Row]:
        ranks = self.ranks
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
        calls = self.calls(x)
        total = sum(range(1, ranks.size + 1))
        for name, (_, call) in calls.items():
            if name in self.symmetric:
                continue  # of its own memory
            x.fill_(ranks.rank + 1)
            call()
            if not bool((x == total).all()):
                raise RuntimeError(f"peer: {name}: a wrong sum of {x.numel()} items")
            x.zero_()  # zeros stay zeros, whatever is summed how often
        spacer = torch.zeros(1, device=ranks.device)
        calls = {
            name: (role, partial(spaced, call, spacer)) for name, (role, call) in calls.items()
        }
        params = {"ranks": ranks.size, "num_bytes": num_bytes}
        case = _sum_case(num_bytes, ranks.where)
        rows = [Row("peer", case, name, role, params=params) for name, (role, _) in calls.items()]
        return timed(ranks, rows, calls, CALLS)

    def host_rows(self) -> Iterator[Row]:
        ranks = self.ranks
        x = torch.zeros(4 * KIB, dtype=torch.bfloat16, device=ranks.device)
        every = self.calls(x)
        samples: dict[str, list[float]] = {name: [] for name in (OURS, NCCL)}
        for round_number in range(HOST_ROUNDS + 1):
            for name, found in samples.items():
                ranks.barrier()
                ms = host_ms(every[name][1], HOST_CALLS)
                if round_number > 0:
                    found.append(ms)
        for name, found in samples.items():
            params = {"ranks": ranks.size}
            row = Row("peer", _host_case(ranks.where), name, every[name][0], params=params)
            fill(row, Timing(tuple(found)))
            yield row


def _symmetric(ranks: Ranks, num_bytes: int) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return what makes calls of PyTorch's own, of so many items of memory of its own."""
    if ranks.device.type == "cpu":
        return {}
    import torch.distributed._symmetric_memory as symmetric

    name = dist.group.WORLD.group_name
    memory = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
    symmetric.rendezvous(memory, name)
    memory.zero_()
    ops = torch.ops.symm_mem

    def one_shot(count: int) -> Callable[[], object]:
        x = memory[:count]
        return lambda: ops.one_shot_all_reduce(x, "sum", name)

    def two_shot(count: int) -> Callable[[], object]:
        x = memory[:count]
        return lambda: ops.two_shot_all_reduce_(x, "sum", name)

    return {SYMMETRIC: one_shot, SYMMETRIC_TWO: two_shot}


def _embedding_rows(ranks: Ranks, inner: Any, all_tokens: tuple[int, ...]) -> Iterator[Row]:
    from jitkern.nn import TPEmbedding

    on_gpu = ranks.device.type == "cuda"
    vocab, hidden = (VOCAB, HIDDEN) if on_gpu else (CPU_VOCAB, CPU_HIDDEN)
    ours = TPEmbedding(
        *(vocab, hidden),
        comm=inner,
        dtype=torch.bfloat16,
        device=ranks.device,
        method="peer",
        group=ranks.cpu_group,
    )
    ours.weight.requires_grad_(False)
    start, count = ours.vocab_range
    weight = ours.weight[:count].clone()  # of the usual memory
    for tokens in all_tokens:
        torch.manual_seed(0)  # the same tokens on all ranks
        ids = torch.randint(vocab, (tokens,), device=ranks.device)

        def usual(ids: torch.Tensor = ids) -> torch.Tensor:
            outside = (ids < start) | (ids >= start + count)
            out = functional.embedding((ids - start).masked_fill(outside, 0), weight)
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            dist.all_reduce(out)
            return out

        def by_jitkern(ids: torch.Tensor = ids) -> torch.Tensor:
            return ours(ids)

        if not torch.equal(usual(), by_jitkern()):
            raise RuntimeError("peer: TPEmbedding differs from mask, F.embedding, all_reduce")
        calls: Calls = {OURS: ("ours", by_jitkern), USUAL: ("peer", usual)}
        case = _embedding_case(tokens, hidden, ranks.where)
        params = {"ranks": ranks.size, "tokens": tokens}
        rows = [Row("peer", case, name, role, params=params) for name, (role, _) in calls.items()]
        yield from timed(ranks, rows, calls, CALLS if tokens <= 1024 else FEW_CALLS)


def _moved_rows(ranks: Ranks, comm: Any, pools: list[float]) -> Iterator[Row]:
    """Rows out of one pool to all ranks, and back."""
    from jitkern.comm import PeerMemory, peer_gather
    from jitkern.offload import PinnedPool, Share

    on_gpu = ranks.device.type == "cuda"
    count = ROWS if on_gpu else CPU_ROWS
    share = Share("jitkern-bench-peer", ranks.rank, ranks.size)
    pool = PinnedPool(int(max(pools) * GIB), share=share, progress=False).tensor()
    peers = PeerMemory(count * ROW_BYTES, ranks.cpu_group)
    caches = [peers.remote(rank, (count, ROW_BYTES), torch.uint8) for rank in range(ranks.size)]
    own, spacer = caches[ranks.rank], torch.zeros(1, device=ranks.device)
    first = own.clone()
    for gib in pools:
        rows_in_pool = int(gib * GIB) // ROW_BYTES
        source = pool[: rows_in_pool * ROW_BYTES].view(rows_in_pool, ROW_BYTES)
        torch.manual_seed(1)  # the same pairs on all ranks
        chosen = torch.randperm(rows_in_pool)[:count] if on_gpu else torch.arange(count)
        pairs = torch.stack([chosen, torch.randperm(count)], 1).to(ranks.device)
        if ranks.rank == 0:
            source[chosen, :8] = (chosen[:, None] >> torch.arange(8)).to(torch.uint8)
        ranks.barrier()
        jitkern.h2d_gather(source, first, pairs)
        peer_gather(source, caches, pairs, comm)
        ranks.barrier()
        if not torch.equal(first, own):
            raise RuntimeError("peer: peer_gather differs from h2d_gather")
        back = pairs.flip(-1).contiguous()
        for op, calls in (
            ("peer_gather", _gathers(ranks, source, caches, pairs, comm, first, spacer)),
            ("peer_scatter", _scatters(ranks, source, own, back, comm, spacer)),
        ):
            case = _rows_case(op, count, gib, ranks.where)
            rows = [
                Row("peer", case, name, role, bytes_moved=count * ROW_BYTES)
                for name, (role, _) in calls.items()
            ]
            for row in rows:
                row.params = {"ranks": ranks.size, "gib": gib}
                row.bytes_note = "of the rows, once, whoever brings them"
            yield from timed(ranks, rows, calls, 2)
        if on_gpu and gib == pools[0]:
            yield from _beside_rows(
                ranks, _gathers(ranks, source, caches, pairs, comm, first, spacer)
            )


def _gathers(
    ranks: Ranks,
    source: torch.Tensor,
    caches: list[torch.Tensor],
    pairs: torch.Tensor,
    comm: Any,
    first: torch.Tensor,
    spacer: torch.Tensor,
) -> Calls:
    from jitkern.comm import peer_gather

    def itself() -> None:
        jitkern.h2d_gather(source, first, pairs)

    return {
        OURS: ("ours", lambda: peer_gather(source, caches, pairs, comm)),
        EACH: ("peer", itself),
        ALONE: ("peer", itself if ranks.rank == 0 else lambda: spacer.zero_()),
    }


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
                for _ in range(GATHERS):
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
        row = Row("peer", _beside_case(ranks.where), name, role, params={"ranks": ranks.size})
        if too_short:
            row.error = too_short[0]
        else:
            fill(row, Timing(samples))
        yield row


def _scatters(
    ranks: Ranks,
    source: torch.Tensor,
    own: torch.Tensor,
    pairs: torch.Tensor,
    comm: Any,
    spacer: torch.Tensor,
) -> Calls:
    from jitkern.comm import peer_scatter

    def itself() -> None:
        jitkern.d2h_scatter(own, source, pairs)

    return {
        OURS: ("ours", lambda: peer_scatter(own, source, pairs, comm)),
        ALONE: ("peer", itself if ranks.rank == 0 else lambda: spacer.zero_()),
    }
