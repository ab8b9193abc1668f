"""comm: a communicator's all-reduce beside torch.distributed, and TPEmbedding.

A process a GPU, of one host; without GPUs two processes over gloo. Graphs hold 200 calls, beyond
128 KB 50, so that what a replay costs once is little beside them, and of 16 MB and more 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from bench import ranks
from bench.ranks import KIB, MIB, Ranks, Sum, embedding_rows, host_rows, sum_case, sum_rows
from jitkern.bench.case import Context, Row

BYTES = (8 * KIB, 128 * KIB, MIB, 16 * MIB, 256 * MIB)
QUICK_BYTES = (8 * KIB, MIB)
TOKENS = (1, 16, 64, 256, 1024, 16_384)
TORCH = "torch.distributed"


def run(ctx: Context) -> Iterator[Row]:
    yield from ranks.run("comm", __name__, ctx)


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """Measure all of it, in step with the other ranks."""
    from jitkern.comm import TorchCommunicator, init_pynccl

    if ranks.on_gpu:
        how = {"tp_rank": ranks.rank, "tp_size": ranks.size, "tp_cpu_group": ranks.cpu_group}
        ours = init_pynccl(**how, max_size_bytes=2 * sum(BYTES))
        no_deadline = init_pynccl(**how, timeout_s=float("inf"))
    else:
        ours = TorchCommunicator()

    def sums(num_bytes: int) -> dict[str, Sum]:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
        found = {
            "jitkern": Sum("ours", x, lambda: ours.all_reduce(x)),
            TORCH: Sum("peer", x, lambda: dist.all_reduce(x)),
        }
        if not ranks.on_gpu:
            return found
        registered, staging = ours.empty(x.shape, x.dtype), torch.empty_like(x)

        def staged() -> None:
            staging.copy_(x)
            ours.all_reduce(staging)
            x.copy_(staging)

        return found | {
            "jitkern, registered buffer": Sum(
                "ours", registered, lambda: ours.all_reduce(registered)
            ),
            "copied to a buffer and back, as mini-sglang": Sum("peer", x, staged),
        }

    for num_bytes in QUICK_BYTES if quick or not ranks.on_gpu else BYTES:
        yield from sum_rows(ranks, "comm", num_bytes, sums(num_bytes))
    with torch.inference_mode():
        small = sums(8 * KIB)
        on_host = {name: (small[name].role, small[name].call) for name in ("jitkern", TORCH)}
        if ranks.on_gpu:
            x = torch.zeros(4 * KIB, dtype=torch.bfloat16, device=ranks.device)
            on_host["jitkern, no deadlines"] = ("ours", partial(no_deadline.all_reduce, x))
        yield from host_rows(ranks, "comm", sum_case(8 * KIB, ranks), on_host, 201)
        tokens = (1, 1024) if quick or not ranks.on_gpu else TOKENS
        yield from embedding_rows(ranks, "comm", ours, tokens)
