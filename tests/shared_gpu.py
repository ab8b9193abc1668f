"""Ranks that share one GPU, on a machine without a second one.

With `RANKS_ON_ONE_GPU=1 pytest -m multigpu` all ranks use the same GPU, where their kernels take
turns of a millisecond. NCCL refuses two ranks on one GPU of a host, so each rank tells it another
host, and NCCL uses sockets.
"""

from __future__ import annotations

import os

import torch

IS_SHARED = os.environ.get("RANKS_ON_ONE_GPU") == "1"
MOST_RANKS = 4


def num_gpus() -> int:
    """Return the number of ranks that can have a GPU."""
    count = torch.cuda.device_count()
    return MOST_RANKS if IS_SHARED and count else count


def take(rank: int) -> torch.device:
    """Make the rank's GPU the current one, and return it."""
    if IS_SHARED:
        os.environ.update(NCCL_HOSTID=f"host-of-rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", 0 if IS_SHARED else rank)
    torch.cuda.set_device(device)
    return device
