"""peer: memory of other ranks. Small sums, an embedding and rows of one pool, without NCCL.

A process a GPU, of one host; without GPUs two processes. Rows go out of one pool to all ranks and
back, beside each rank that fetches all of them over its own link, all at once as engines do, and
beside one link that does so alone.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import jitkern
from bench.peers import host_pool
from bench.ranks import KIB, MIB, Ranks, Sum
from bench.ranks import run as run_ranks
from jitkern.bench.case import Context, Row, error_text

BYTES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
ROW_BYTES = 656
OURS, NCCL = "jitkern", "torch.distributed"
EACH, ALONE = "each rank by itself, all at once", "one rank, by itself and alone"


def run(ctx: Context) -> Iterator[Row]:
    yield from run_ranks("peer", __name__, ctx)


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    from jitkern.comm import PeerCommunicator, TorchCommunicator, init_pynccl

    inner: Any = TorchCommunicator()
    if ranks.on_gpu:
        inner = init_pynccl(tp_rank=ranks.rank, tp_size=ranks.size, tp_cpu_group=ranks.cpu_group)
    quick = quick or not ranks.on_gpu
    with torch.inference_mode():
        # Also where NCCL would take over: what is measured is where that should be.
        ours = PeerCommunicator(inner, ranks.cpu_group, max_bytes=BYTES[-1])
        symmetric = _symmetric(ranks) if ranks.on_gpu else None
        for num_bytes in QUICK_BYTES if quick else BYTES:
            sums = _sums(ranks, ours, num_bytes)
            if symmetric is not None:
                sums |= symmetric(num_bytes // 2)
            yield from ranks.sum_rows(num_bytes, sums, f"{OURS}, one behind the other")
        sums = _sums(ranks, ours, 8 * KIB)
        on_host = {name: (sums[name].role, sums[name].call) for name in (OURS, NCCL)}
        yield from ranks.host_rows(ranks.sum_case(8 * KIB), on_host, 101)
        tokens = (1, 1024) if quick else (1, 1024, 16_384)
        how = {"method": "peer", "group": ranks.cpu_group}
        yield from ranks.embedding_rows(inner, tokens, **how)
        yield from _moved_rows(ranks, ours, quick)


# -- sums ------------------------------------------------------------------------------------------


def _sums(ranks: Ranks, ours: Any, num_bytes: int) -> dict[str, Sum]:
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)

    def by(algorithm: str) -> Sum:
        return Sum("ours", x, lambda: ours.reducer.all_reduce(x, algorithm=algorithm))

    return {
        OURS: Sum("ours", x, lambda: ours.all_reduce(x)),
        f"{OURS}, one shot": by("one_shot"),
        f"{OURS}, two shots": by("two_shot"),
        NCCL: Sum("peer", x, lambda: dist.all_reduce(x)),
    }


def _symmetric(ranks: Ranks) -> Callable[[int], dict[str, Sum]]:
    """Return PyTorch's own sums, of memory of its own, by the number of items."""
    import torch.distributed._symmetric_memory as symmetric

    group, ops, error = dist.group.WORLD.group_name, torch.ops.symm_mem, ""
    how = {"dtype": torch.bfloat16, "device": ranks.device}
    try:
        memory = symmetric.empty(BYTES[-1] // 2, **how)
        symmetric.rendezvous(memory, group)
    except Exception as failed:  # a peer that fails is a row, not the end of the run
        memory, error = torch.zeros(BYTES[-1] // 2, **how), error_text(failed)
    error = ranks.first_text(error)

    def sums(count: int) -> dict[str, Sum]:
        def by(op: str) -> Sum:
            def call() -> object:
                if error:
                    raise RuntimeError(error)
                return getattr(ops, op)(memory[:count], "sum", group)

            return Sum("peer", memory[:count], call)

        return {
            "torch symmetric memory, one shot": by("one_shot_all_reduce"),
            "torch symmetric memory, two shots": by("two_shot_all_reduce_"),
        }

    return sums


# -- rows of a pool --------------------------------------------------------------------------------


def _moved_rows(ranks: Ranks, comm: Any, quick: bool) -> Iterator[Row]:
    """Measure rows of one pool; raise on all ranks unless each gets the rows that it should."""
    from jitkern.comm import PeerMemory, peer_gather, peer_scatter
    from jitkern.offload import PinnedPool, Share

    count, gib = (262_144, 0.25 if quick else 16) if ranks.on_gpu else (4096, 0.01)
    where = f"{count:,} rows of {ROW_BYTES} B, a pool of {gib:g} GiB, {ranks.where}"
    # Rank 0 says: what Linux has free differs from one moment to the next.
    if note := ranks.first_text(host_pool.lacks(gib) if ranks.rank == 0 else ""):
        yield Row("peer", f"peer_gather, {where}", OURS, "ours", note=note)
        return
    memory = PeerMemory(count * ROW_BYTES, ranks.cpu_group)
    caches = [memory.remote(rank, (count, ROW_BYTES), torch.uint8) for rank in range(ranks.size)]
    own = caches[ranks.rank]
    share = Share(f"bench-{os.getppid()}", ranks.rank, ranks.size, timeout_s=120)
    with host_pool.trusted():
        pool = PinnedPool(int(gib * host_pool.GIB), share=share)
    source = host_pool.rows_of(pool.tensor(), gib, ROW_BYTES)
    torch.manual_seed(1)  # the same pairs on all ranks
    chosen = torch.randperm(len(source))[:count] if ranks.on_gpu else torch.arange(count)
    to = torch.randperm(count)
    pairs = torch.stack([chosen, to], 1).to(ranks.device)
    back = pairs.flip(-1).contiguous()
    if ranks.rank == 0:
        source[chosen, :8] = (chosen[:, None] >> torch.arange(8)).to(torch.uint8)

    def gather() -> None:
        peer_gather(source, caches, pairs, comm)

    def scatter() -> None:
        peer_scatter(own, source, back, comm)

    own.fill_(0xA5)
    wrong = ""
    for call in (gather, scatter):
        ranks.barrier()
        call()
        ranks.barrier()
        if not torch.equal(own[to.to(own.device)].cpu(), source[chosen]):
            wrong = wrong or f"rank {ranks.rank}: peer_{call.__name__} moves other rows"
        own.bitwise_not_()
    if wrong := ranks.first_text(wrong):
        raise RuntimeError(f"peer: {wrong}")
    each = partial(jitkern.h2d_gather, source, torch.empty_like(own), pairs)
    each_back = partial(jitkern.d2h_scatter, own, source, back)
    nothing = torch.zeros(1, device=ranks.device).zero_
    alone, alone_back = (each, each_back) if ranks.rank == 0 else (nothing, nothing)
    gathers = {OURS: ("ours", gather), EACH: ("peer", each), ALONE: ("peer", alone)}
    scatters = {OURS: ("ours", scatter), ALONE: ("peer", alone_back)}
    # The bytes are those of the rows, once, whoever brings them.
    fields = {"params": {"ranks": ranks.size, "gib": gib}, "bytes_moved": count * ROW_BYTES}
    for op, calls in (("peer_gather", gathers), ("peer_scatter", scatters)):
        yield from ranks.timed(f"{op}, {where}", calls, 10 if ranks.on_gpu else 2, **fields)
    ranks.barrier()
    pool.close()
