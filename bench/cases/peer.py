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
from torch.nn import functional

from bench import ranks
from bench.peer_rows import OURS, moved_rows
from bench.ranks import KIB, MIB, Calls, Ranks, calls_for, size_text, spaced, timed
from jitkern.bench.case import Context, Row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Timing, host_ms

PEERS = ()

BYTES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
HOST_CALLS, HOST_ROUNDS = 30, 101  # fewer than wait for the GPU
VOCAB, HIDDEN = 131_072, 4096
CPU_VOCAB, CPU_HIDDEN = 4096, 1024
TOKENS = (1, 1024, 16_384)

ONE_SHOT, TWO_SHOT = "jitkern, one shot", "jitkern, two shots"
IN_A_ROW, SPACER = "jitkern, one behind the other", "the small kernel behind each call"
NCCL = "torch.distributed"
SYMMETRIC = "torch symmetric memory, one shot"
SYMMETRIC_TWO = "torch symmetric memory, two shots"
USUAL = "mask, F.embedding, all_reduce"

# By number of GPUs, as the issue of this part has them.
OF_NCCL = {
    2: {8 * KIB: 0.28, 128 * KIB: 0.32, MIB: 0.42},
    4: {8 * KIB: 0.32, 128 * KIB: 0.4, MIB: 0.6},
}
OF_SYMMETRIC = {2: {8 * KIB: 0.45, MIB: 0.7}, 4: {8 * KIB: 0.5, MIB: 0.8}}
# A bare kernel of the same protocol takes 2.42, 2.83, 6.50 and 9.30 us in a row.
ROW_US = {8 * KIB: 2.6, 128 * KIB: 3.1, MIB: 6.8, 2 * MIB: 9.8}
OF_USUAL = {2: {1: 7.0, 1024: 4.0, 16_384: 3.3}, 4: {1: 9.0, 1024: 2.8, 16_384: 2.4}}
OF_ALONE = {2: {0.25: 1.9, 16: 1.95, 64: 1.95}, 4: {0.25: 3.6, 16: 3.8, 64: 3.8}}


def run(ctx: Context) -> Iterator[Row]:
    yield from ranks.run("peer", __name__, ctx)


def _sum_case(num_bytes: int, where: str) -> str:
    return f"all_reduce, {size_text(num_bytes)} bf16, {where}"


def _host_case(where: str) -> str:
    return f"all_reduce, 8 KB bf16, {where}, host time"


def _embedding_case(tokens: int, hidden: int, where: str) -> str:
    return f"TPEmbedding, {tokens:,} tokens of {hidden:,} bf16, {where}"


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
        yield from timed(ranks, rows, calls, calls_for(ranks, 2 * tokens * hidden))
