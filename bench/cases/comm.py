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

from bench import peers, ranks
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

PEERS = (peers.nccl,)

BYTES = (8 * KIB, 128 * KIB, MIB, 16 * MIB, 256 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
HOST_BYTES = 8 * KIB
HOST_ROUNDS = 201
VOCAB, HIDDEN = 131_072, 4096
TOKENS = (1, 16, 64, 256, 1024, 16_384)
QUICK_TOKENS = (1, 1024)
CPU_VOCAB, CPU_HIDDEN = 4096, 256

OURS, NO_DEADLINE = "jitkern", "jitkern, no deadlines"
REGISTERED = "jitkern, registered buffer"
TORCH, BARE = "torch.distributed", "bare ncclAllReduce"
STAGED = "copied to a buffer and back, as mini-sglang"


def run(ctx: Context) -> Iterator[Row]:
    yield from ranks.run("comm", __name__, ctx)


def sum_case(num_bytes: int, where: str) -> str:
    return f"all_reduce, {size_text(num_bytes)} bf16, {where}"


# -- in each rank ----------------------------------------------------------------------------------


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """Measure all of it, in step with the other ranks."""
    reducers = _Reducers(ranks)
    for num_bytes in QUICK_BYTES if quick else BYTES:
        if ranks.device.type == "cuda" or num_bytes <= MIB:
            yield from _reduced(ranks, reducers, num_bytes)
    with torch.inference_mode():
        case = f"{sum_case(HOST_BYTES, ranks.where)}, host time"
        yield from host_rows(ranks, "comm", case, reducers.on_the_host(), HOST_ROUNDS)
        tokens = QUICK_TOKENS if quick or ranks.device.type == "cpu" else TOKENS
        yield from embedding_rows(ranks, "comm", reducers.embedding(), tokens)


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

    def on_the_host(self) -> Calls:
        """Return what is called on a small tensor, to see what that costs the host."""
        x = torch.zeros(HOST_BYTES // 2, dtype=torch.bfloat16, device=self.ranks.device)
        every, _ = self.of(x)
        calls = {name: every[name] for name in (OURS, TORCH, BARE) if name in every}
        if self.ranks.device.type == "cuda":
            calls[NO_DEADLINE] = ("ours", lambda: self.no_deadline.all_reduce(x))
        return calls

    def embedding(self) -> Any:
        """Return the embedding that is looked up, with random weights."""
        from jitkern.nn import TPEmbedding

        device = self.ranks.device
        size = (VOCAB, HIDDEN) if device.type == "cuda" else (CPU_VOCAB, CPU_HIDDEN)
        ours = TPEmbedding(*size, comm=self.ours, dtype=torch.bfloat16, device=device)
        torch.manual_seed(self.ranks.rank)
        ours.weight.data.normal_()
        return ours

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
