"""comm: a communicator's all-reduce beside torch.distributed, and TPEmbedding.

A process a GPU, of one host; without GPUs two processes over gloo. Graphs hold 200 calls, beyond
128 KB 50, so that what a replay costs once is little beside them, and of 16 MB and more 5.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from bench import ranks as processes
from bench.case import Row
from bench.ranks import KIB, MIB, Call, Ranks

BYTES = (8 * KIB, 128 * KIB, MIB, 16 * MIB, 256 * MIB)
QUICK_BYTES = (8 * KIB, MIB)

run = partial(processes.run, "comm", __name__)


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    from jitkern.comm import TorchCommunicator, init_pynccl

    ours = TorchCommunicator()
    if ranks.on_gpu:
        how = {"tp_rank": ranks.rank, "tp_size": ranks.size, "tp_cpu_group": ranks.cpu_group}
        ours = init_pynccl(**how, max_size_bytes=2 * sum(BYTES))

    def sums(num_bytes: int) -> dict[str, Call]:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ranks.device)
        found = {
            "jitkern": Call("ours", lambda: ours.all_reduce(x), x),
            "torch.distributed": Call("peer", lambda: dist.all_reduce(x), x),
        }
        if not ranks.on_gpu:
            return found
        buffer, staging = ours.empty(x.shape, x.dtype), torch.empty_like(x)

        def staged() -> None:
            staging.copy_(x)
            ours.all_reduce(staging)
            x.copy_(staging)

        return found | {
            "jitkern, registered buffer": Call("ours", lambda: ours.all_reduce(buffer), buffer),
            "copied to a buffer and back, as mini-sglang": Call("peer", staged, x),
        }

    for num_bytes in QUICK_BYTES if quick else BYTES:
        yield from ranks.sum_rows(num_bytes, sums(num_bytes))
    with torch.inference_mode():
        yield from ranks.host_rows(8 * KIB, sums(8 * KIB))
        tokens = (1, 1024) if quick else (1, 16, 64, 256, 1024, 16_384)
        yield from ranks.embedding_rows(ours, tokens)
