"""comm: a communicator's all-reduce beside torch.distributed and bare NCCL, and TPEmbedding.

A process a GPU, of one host; without GPUs two processes over gloo. Graphs hold 200 calls, beyond
128 KB 50, so that what a replay costs once is little beside them, and of 16 MB and more 5. Behind
each call stands a small kernel, as in a model, whose time is in: two of NCCL's kernels in a row
cost 3 us more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from bench import peers, ranks
from bench.ranks import KIB, MIB, Calls, Ranks, calls_for, size_text, spaced, timed
from jitkern.bench.case import Context, Row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Timing, host_ms

PEERS = (peers.nccl,)

BYTES = (8 * KIB, 128 * KIB, MIB, 16 * MIB, 256 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
HOST_BYTES = 8 * KIB
# Fewer than wait for the GPU: a call that comes behind 32 others waits until some are done.
HOST_CALLS, HOST_ROUNDS = 30, 201
VOCAB, HIDDEN = 131_072, 4096
TOKENS = (1, 16, 64, 256, 1024, 16_384)
QUICK_TOKENS = (1, 1024)
CPU_VOCAB, CPU_HIDDEN = 4096, 256

OURS, NO_DEADLINE = "jitkern", "jitkern, no deadlines"
REGISTERED = "jitkern, registered buffer"
TORCH, BARE = "torch.distributed", "bare ncclAllReduce"
STAGED = "copied to a buffer and back, as mini-sglang"
USUAL = "mask, F.embedding, all_reduce"
OF_USUAL = {1: 0.5, 1024: 0.75, 16_384: 0.8}


def run(ctx: Context) -> Iterator[Row]:
    yield from ranks.run("comm", __name__, ctx)


def sum_case(num_bytes: int, where: str) -> str:
    return f"all_reduce, {size_text(num_bytes)} bf16, {where}"


def _host_case(where: str) -> str:
    return f"all_reduce, {size_text(HOST_BYTES)} bf16, {where}, host time"


def _embedding_case(tokens: int, hidden: int, where: str) -> str:
    return f"TPEmbedding, {tokens:,} tokens of {hidden:,} bf16, {where}"


# -- in each rank ----------------------------------------------------------------------------------


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """Measure all of it, in step with the other ranks."""
    reducers = _Reducers(ranks)
    for num_bytes in QUICK_BYTES if quick else BYTES:
        if ranks.device.type == "cuda" or num_bytes <= MIB:
            yield from _reduced(ranks, reducers, num_bytes)
    with torch.inference_mode():
        yield from _host_rows(ranks, reducers)
    tokens = QUICK_TOKENS if quick else TOKENS
    yield from _embedding_rows(ranks, reducers, tokens)


class _Reducers:
    """Everything that reduces: functions of a tensor, in place."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        if ranks.device.type == "cuda":
            from jitkern.comm import init_pynccl

            make = partial(
                init_pynccl,
                tp_rank=ranks.rank,
                tp_size=ranks.size,
                tp_cpu_group=ranks.cpu_group,
            )
            self.ours: Any = make(max_size_bytes=BYTES[-1])
            self.no_deadline: Any = make(timeout_s=float("inf"))
            self.bare = self._bare()
        else:
            from jitkern.comm import TorchCommunicator

            self.ours = TorchCommunicator()

    def _bare(self) -> Callable[[torch.Tensor], object]:
        library = peers.nccl()
        mapped = Path("/proc/self/maps").read_text().splitlines()
        loaded = next("/" + line.partition("/")[2] for line in mapped if "libnccl.so" in line)
        library.open(loaded)
        ids = [bytes(library.unique_id()) if self.ranks.rank == 0 else b""]
        dist.broadcast_object_list(ids, src=0, group=self.ranks.cpu_group)
        comm = library.communicator(ids[0], self.ranks.size, self.ranks.rank)
        bfloat16 = 9
        return lambda x: library.all_reduce(x, x.numel(), bfloat16, comm)

    def of(self, x: torch.Tensor) -> tuple[Calls, dict[str, torch.Tensor]]:
        """Return role and call of each, and the tensor that each reduces: `x`, or one like it."""
        found: Calls = {
            OURS: ("ours", lambda: self.ours.all_reduce(x)),
            TORCH: ("peer", lambda: dist.all_reduce(x)),
        }
        if self.ranks.device.type != "cuda":
            return found, dict.fromkeys(found, x)
        registered = self.ours.empty(x.shape, x.dtype)
        staging = torch.empty_like(x)

        def staged() -> None:
            staging.copy_(x)
            self.ours.all_reduce(staging)
            x.copy_(staging)

        found |= {
            REGISTERED: ("ours", lambda: self.ours.all_reduce(registered)),
            BARE: ("peer", lambda: self.bare(x)),
            STAGED: ("peer", staged),
        }
        return found, dict.fromkeys(found, x) | {REGISTERED: registered}


def _reduced(ranks: Ranks, reducers: _Reducers, num_bytes: int) -> list[Row]:
    # Zeros stay zeros, whatever is summed how often.
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
    calls, tensors = reducers.of(x)
    _check_sum(ranks, calls, tensors)
    moved = 2 * (ranks.size - 1) * num_bytes // ranks.size
    spacer = torch.zeros(1, device=ranks.device)
    calls = {name: (role, partial(spaced, call, spacer)) for name, (role, call) in calls.items()}
    rows = [
        Row("comm", sum_case(num_bytes, ranks.where), name, role, bytes_moved=moved)
        for name, (role, _) in calls.items()
    ]
    for row in rows:
        row.params = {"ranks": ranks.size, "num_bytes": num_bytes}
        row.bytes_note = "2 (n - 1) / n of the tensor: bus bandwidth"
    return timed(ranks, rows, calls, calls_for(ranks, num_bytes))


def _check_sum(ranks: Ranks, calls: Calls, tensors: dict[str, torch.Tensor]) -> None:
    """Raise unless each of them sums what the ranks have."""
    total = sum(range(1, ranks.size + 1))
    for name, (_, call) in calls.items():
        tensor = tensors[name]
        tensor.fill_(ranks.rank + 1)
        call()
        if not bool((tensor == total).all()):
            raise RuntimeError(f"comm: {name}: a wrong sum of {tensor.numel()} items")
        tensor.zero_()


def _host_rows(ranks: Ranks, reducers: _Reducers) -> Iterator[Row]:
    x = torch.zeros(HOST_BYTES // 2, dtype=torch.bfloat16, device=ranks.device)
    every, _ = reducers.of(x)
    calls = {name: every[name] for name in (OURS, TORCH, BARE) if name in every}
    if ranks.device.type == "cuda":
        calls[NO_DEADLINE] = ("ours", lambda: reducers.no_deadline.all_reduce(x))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(HOST_ROUNDS + 1):
        for name, (_, call) in calls.items():
            ranks.barrier()
            ms = host_ms(call, HOST_CALLS)
            if round_number > 0:
                samples[name].append(ms)
    for name, (role, _) in calls.items():
        row = Row("comm", _host_case(ranks.where), name, role, params={"ranks": ranks.size})
        fill(row, Timing(tuple(samples[name])))
        yield row


def _embedding_rows(
    ranks: Ranks, reducers: _Reducers, all_tokens: tuple[int, ...]
) -> Iterator[Row]:
    from jitkern.nn import TPEmbedding

    on_gpu = ranks.device.type == "cuda"
    vocab, hidden = (VOCAB, HIDDEN) if on_gpu else (CPU_VOCAB, CPU_HIDDEN)
    ours = TPEmbedding(vocab, hidden, comm=reducers.ours, dtype=torch.bfloat16, device=ranks.device)
    weight = ours.weight.data
    torch.manual_seed(ranks.rank)
    weight.normal_()
    share = vocab // ranks.size
    start = ranks.rank * share
    for tokens in all_tokens if on_gpu else all_tokens[:2]:
        torch.manual_seed(0)  # the same tokens on all ranks
        ids = torch.randint(vocab, (tokens,), device=ranks.device)

        def usual(ids: torch.Tensor = ids) -> torch.Tensor:
            outside = (ids < start) | (ids >= start + share)
            out = functional.embedding((ids - start).masked_fill(outside, 0), weight[:share])
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            dist.all_reduce(out)
            return out

        def by_jitkern(ids: torch.Tensor = ids) -> torch.Tensor:
            return ours(ids)

        with torch.inference_mode():
            if not torch.equal(usual(), by_jitkern()):
                raise RuntimeError("comm: TPEmbedding differs from mask, F.embedding, all_reduce")
            calls: Calls = {
                OURS: ("ours", by_jitkern),
                USUAL: ("peer", usual),
            }
            case = _embedding_case(tokens, hidden, ranks.where)
            params = {"ranks": ranks.size, "tokens": tokens}
            rows = [
                Row("comm", case, name, role, params=params) for name, (role, _) in calls.items()
            ]
            yield from timed(ranks, rows, calls, calls_for(ranks, 2 * tokens * hidden))
