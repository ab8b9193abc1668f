"""peer: memory of other ranks. Small sums, an embedding and rows of one pool, without NCCL.

One process per GPU of a host; without GPUs two processes. Rows go from one pool to all ranks and
back. The peers: each rank fetches all rows over its own link, all ranks at once as engines do; and
one rank alone does so.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import jitkern
from bench import ranks as processes
from bench.case import Row, error_text
from bench.peers import host_pool
from bench.ranks import KIB, MIB, Call, Ranks

BYTES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
ROW_BYTES = 656
ALONE = "one rank, by itself and alone"

run = partial(processes.run, "peer", __name__)


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    from jitkern.comm import PeerCommunicator, TorchCommunicator, init_pynccl

    inner: Any
    if ranks.on_gpu:
        inner = init_pynccl(tp_rank=ranks.rank, tp_size=ranks.size, tp_cpu_group=ranks.cpu_group)
    else:
        inner = TorchCommunicator()
    with torch.inference_mode():
        # A larger max_bytes than the default: this measures where NCCL should take over.
        ours = PeerCommunicator(inner, ranks.cpu_group, max_bytes=BYTES[-1])
        symmetric = _symmetric(ranks) if ranks.on_gpu else None
        for num_bytes in QUICK_BYTES if quick else BYTES:
            sums = _sums(ranks, ours, num_bytes)
            if symmetric is not None:
                sums |= symmetric(num_bytes // 2)
            yield from ranks.sum_rows(num_bytes, sums, "jitkern, one behind the other")
        yield from ranks.host_rows(8 * KIB, _sums(ranks, ours, 8 * KIB))
        tokens = (1, 1024) if quick else (1, 1024, 16_384)
        yield from ranks.embedding_rows(inner, tokens, algorithm="peer", group=ranks.cpu_group)
        yield from _moved_rows(ranks, ours, quick)


# -- sums ------------------------------------------------------------------------------------------


def _sums(ranks: Ranks, ours: Any, num_bytes: int) -> dict[str, Call]:
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
    by = partial(ours.reducer.all_reduce, x)
    return {
        "jitkern": Call("ours", lambda: ours.all_reduce(x), x),
        "jitkern, one shot": Call("ours", partial(by, algorithm="one_shot"), x),
        "jitkern, two shots": Call("ours", partial(by, algorithm="two_shot"), x),
        "torch.distributed": Call("peer", lambda: dist.all_reduce(x), x),
    }


def _symmetric(ranks: Ranks) -> Callable[[int], dict[str, Call]]:
    """Return PyTorch's sums over symmetric memory, by the number of items."""
    import torch.distributed._symmetric_memory as symmetric

    group, error = dist.group.WORLD.group_name, ""
    options = {"dtype": torch.bfloat16, "device": ranks.device}
    try:
        memory = symmetric.empty(BYTES[-1] // 2, **options)
        symmetric.rendezvous(memory, group)
    except Exception as failed:  # a peer that fails is a row, not the end of the run
        memory, error = torch.zeros(BYTES[-1] // 2, **options), error_text(failed)
    error = ranks.first_text(error)

    def reduce(op: str, x: torch.Tensor) -> object:
        if error:
            raise RuntimeError(error)
        return getattr(torch.ops.symm_mem, op)(x, "sum", group)

    def sums(count: int) -> dict[str, Call]:
        x = memory[:count]
        one_shot = partial(reduce, "one_shot_all_reduce", x)
        two_shots = partial(reduce, "two_shot_all_reduce_", x)
        return {
            "torch symmetric memory, one shot": Call("peer", one_shot, x),
            "torch symmetric memory, two shots": Call("peer", two_shots, x),
        }

    return sums


# -- rows of a pool --------------------------------------------------------------------------------


def _moved_rows(ranks: Ranks, comm: Any, quick: bool) -> Iterator[Row]:
    """Measure rows of one pool; raise on all ranks unless each gets the rows that it should."""
    from jitkern.comm import PeerMemory, peer_gather, peer_scatter
    from jitkern.offload import PinnedPool, PoolShare

    count, gib = (262_144, 0.25 if quick else 16) if ranks.on_gpu else (4096, 0.01)
    where = f"{count:,} rows of {ROW_BYTES} B, a pool of {gib:g} GiB, {ranks.where}"
    # Rank 0 decides for all: the free memory changes from one moment to the next.
    if note := ranks.first_text(host_pool.lacks(gib) if ranks.rank == 0 else ""):
        yield Row("peer", f"peer_gather, {where}", "jitkern", "ours", note=note)
        return
    memory = PeerMemory(count * ROW_BYTES, ranks.cpu_group)
    caches = [memory.remote(rank, (count, ROW_BYTES), torch.uint8) for rank in range(ranks.size)]
    own = caches[ranks.rank]
    share = PoolShare(f"bench-{os.getppid()}", ranks.cpu_group, timeout_s=120)
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
    gathers = {
        "jitkern": Call("ours", gather),
        "each rank by itself, all at once": Call("peer", each),
        ALONE: Call("peer", alone),
    }
    scatters = {"jitkern": Call("ours", scatter), ALONE: Call("peer", alone_back)}
    # The bytes are those of the rows, once, whoever brings them.
    fields = {"params": {"ranks": ranks.size, "gib": gib}, "bytes_moved": count * ROW_BYTES}
    for op, calls in (("peer_gather", gathers), ("peer_scatter", scatters)):
        yield from ranks.timed(f"{op}, {where}", calls, 10 if ranks.on_gpu else 2, **fields)
    ranks.barrier()
    pool.close()
