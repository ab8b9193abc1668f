"""peer: memory of other ranks. Small sums, an embedding and rows of one pool, without NCCL.

A process a GPU, of one host; without GPUs two processes. Graphs and small kernels as in `comm`.
`bench/peer_rows.py` has the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench import ranks
from bench.peer_rows import OURS, moved_rows
from bench.ranks import (
    KIB,
    MIB,
    Calls,
    Ranks,
    calls_for,
    embedding_rows,
    host_rows,
    size_text,
    spaced,
    timed,
)
from jitkern.bench.case import Context, Row

PEERS = ()

BYTES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
HOST_ROUNDS = 101
VOCAB, HIDDEN = 131_072, 4096
CPU_VOCAB, CPU_HIDDEN = 4096, 1024
TOKENS = (1, 1024, 16_384)

ONE_SHOT, TWO_SHOT = "jitkern, one shot", "jitkern, two shots"
IN_A_ROW, SPACER = "jitkern, one behind the other", "the small kernel behind each call"
NCCL = "torch.distributed"
SYMMETRIC = "torch symmetric memory, one shot"
SYMMETRIC_TWO = "torch symmetric memory, two shots"


def run(ctx: Context) -> Iterator[Row]:
    yield from ranks.run("peer", __name__, ctx)


def _sum_case(num_bytes: int, where: str) -> str:
    return f"all_reduce, {size_text(num_bytes)} bf16, {where}"


# -- in each rank ----------------------------------------------------------------------------------


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """Measure all of it, in step with the other ranks."""
    inner = _inner(ranks)
    on_gpu = ranks.device.type == "cuda"
    with torch.inference_mode():
        sums = _Sums(ranks, inner)
        for num_bytes in QUICK_BYTES if quick or not on_gpu else BYTES:
            yield from sums.rows(num_bytes)
        case = f"{_sum_case(8 * KIB, ranks.where)}, host time"
        yield from host_rows(ranks, "peer", case, sums.on_the_host(), HOST_ROUNDS)
        tokens = TOKENS[:2] if quick or not on_gpu else TOKENS
        yield from embedding_rows(ranks, "peer", _embedding(ranks, inner), tokens)
        yield from moved_rows(ranks, sums.ours, quick)


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
        self.symmetric = _Symmetric(ranks, BYTES[-1])

    def calls(self, x: torch.Tensor) -> Calls:
        reducer = self.ours.reducer
        assert reducer is not None
        return {
            OURS: ("ours", lambda: self.ours.all_reduce(x)),
            ONE_SHOT: ("ours", lambda: reducer.all_reduce(x, algorithm="one_shot")),
            TWO_SHOT: ("ours", lambda: reducer.all_reduce(x, algorithm="two_shot")),
            NCCL: ("peer", lambda: dist.all_reduce(x)),
        }

    def rows(self, num_bytes: int) -> Iterator[Row]:
        ranks = self.ranks
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
        total = sum(range(1, ranks.size + 1))
        calls = dict(self.calls(x))
        for name, (_, call) in calls.items():
            x.fill_(ranks.rank + 1)
            call()
            wrong = "" if bool((x == total).all()) else f"rank {ranks.rank}: {name}: a wrong sum"
            wrong = ranks.first_text(wrong)
            if wrong:
                raise RuntimeError(f"peer: {wrong} of {x.numel()} items")
            x.zero_()  # zeros stay zeros, whatever is summed how often
        case = _sum_case(num_bytes, ranks.where)
        params = {"ranks": ranks.size, "num_bytes": num_bytes}
        for name, call in self.symmetric.calls(x.numel()).items():
            wrong = self.symmetric.wrong(call, x.numel(), total)
            if wrong:
                yield Row("peer", case, name, "peer", params=params, error=wrong)
            else:
                calls[name] = ("peer", call)
        spacer = torch.zeros(1, device=ranks.device)
        in_a_row = calls[OURS]
        calls = {
            name: (role, partial(spaced, call, spacer)) for name, (role, call) in calls.items()
        }
        calls |= {IN_A_ROW: in_a_row, SPACER: ("floor", spacer.zero_)}
        rows = [Row("peer", case, name, role, params=params) for name, (role, _) in calls.items()]
        yield from timed(ranks, rows, calls, calls_for(ranks, num_bytes))

    def on_the_host(self) -> Calls:
        """Return what is called on a small tensor, to see what that costs the host."""
        every = self.calls(torch.zeros(4 * KIB, dtype=torch.bfloat16, device=self.ranks.device))
        return {name: every[name] for name in (OURS, NCCL)}


class _Symmetric:
    """PyTorch's own sums, of memory of its own: none without GPUs."""

    def __init__(self, ranks: Ranks, num_bytes: int) -> None:
        self.ranks, self.error = ranks, ""
        if ranks.device.type == "cpu":
            return
        self.group = dist.group.WORLD.group_name
        try:
            import torch.distributed._symmetric_memory as symmetric

            self.memory = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
            symmetric.rendezvous(self.memory, self.group)
            self.memory.zero_()
        except Exception as error:  # a peer that fails is a row, not the end of the run
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]
        self.error = ranks.first_text(self.error)

    def calls(self, count: int) -> dict[str, Callable[[], Any]]:
        """Return what adds up so many items, and returns where the sum is."""
        if self.ranks.device.type == "cpu":
            return {}
        ops, group = torch.ops.symm_mem, self.group
        x = None if self.error else self.memory[:count]
        return {
            SYMMETRIC: lambda: ops.one_shot_all_reduce(x, "sum", group),
            SYMMETRIC_TWO: lambda: ops.two_shot_all_reduce_(x, "sum", group),
        }

    def wrong(self, call: Callable[[], Any], count: int, total: int) -> str:
        """Return what is wrong on any rank with a call; afterwards there are zeros again."""
        if self.error:
            return self.error
        wrong, x = "", self.memory[:count]
        x.fill_(self.ranks.rank + 1)
        self.ranks.barrier()
        try:
            if not bool((call() == total).all()):
                wrong = f"rank {self.ranks.rank}: a wrong sum of {count} items; not timed"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        self.ranks.barrier()
        x.zero_()
        self.ranks.barrier()
        return self.ranks.first_text(wrong)


def _embedding(ranks: Ranks, inner: Any) -> Any:
    from jitkern.nn import TPEmbedding

    size = (VOCAB, HIDDEN) if ranks.device.type == "cuda" else (CPU_VOCAB, CPU_HIDDEN)
    ours = TPEmbedding(
        *size,
        comm=inner,
        dtype=torch.bfloat16,
        device=ranks.device,
        method="peer",
        group=ranks.cpu_group,
    )
    ours.weight.requires_grad_(False)
    return ours
