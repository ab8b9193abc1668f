"""Ranks that share one GPU, for who has no second: what they do is tested, not how fast.

`RANKS_ON_ONE_GPU=1 pytest -m multigpu` has all processes that are to be ranks use the same one.
Their kernels take turns there, by the millisecond. NCCL refuses that of one host, so each rank says
that it is on a host of its own, and NCCL goes by sockets.
"""

from __future__ import annotations

import os
from typing import Any

import torch

IS_SHARED = os.environ.get("RANKS_ON_ONE_GPU") == "1"
MOST_RANKS = 4


def num_gpus() -> int:
    """Return how many ranks may have a GPU."""
    found = torch.cuda.device_count()
    return MOST_RANKS if IS_SHARED and found else found


def take(rank: int) -> torch.device:
    """Return the GPU of this process's rank, from now on the current one."""
    if IS_SHARED:
        os.environ.update(NCCL_HOSTID=f"host-of-rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        real = torch.cuda.get_device_properties
        torch.cuda.get_device_properties = lambda device=None: Properties(real(device), rank)
    device = torch.device("cuda", 0 if IS_SHARED else rank)
    torch.cuda.set_device(device)
    return device


class Properties:
    """Those of the GPU, with a name of this rank's own."""

    def __init__(self, real: Any, rank: int) -> None:
        self._real, self.uuid = real, f"GPU-of-rank-{rank}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
