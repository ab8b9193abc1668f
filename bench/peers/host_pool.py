"""Host memory of the size that servers keep: one pinned pool, of which cases take a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch

from jitkern.fs import free_bytes
from jitkern.offload import PinnedPool, memory

GIB = 1 << 30
POOL_GIB = (0.2, 1, 4, 8, 16, 32, 64, 96)
FREE_GIB = "BENCH_FREE_GIB"


def free_gib() -> float:
    """Return how many GiB of host memory may be taken: what FREE_GIB says, else what Linux says."""
    said = os.environ.get(FREE_GIB)
    return float(said) if said else (free_bytes() or 0) / GIB


def lacks(gib: float) -> str:
    """Return why a pool of this size is left out; empty where half of the memory stays free."""
    free = free_gib()
    if gib <= 0.55 * free:
        return ""
    return f"left out: {free:.1f} GiB of host memory are free ({FREE_GIB}=N: there are N)"


@contextmanager
def trusted() -> Iterator[None]:
    """Have pools that are made in it go by `free_gib` as well."""
    with mock.patch.object(memory, "free_bytes", lambda: int(free_gib() * GIB)):
        yield


@cache
def sizes(at_most: float) -> list[float]:
    """Return the pool sizes in GiB that fit: half of the machine's memory stays free.

    The same all along, as the pool that is allocated then would count as memory that is not free.
    """
    return [gib for gib in POOL_GIB if gib <= at_most and not lacks(gib)]


@cache
def allocated(gib: float) -> torch.Tensor:
    """Return pinned bytes that hold the number of each 8, for the rest of the process."""
    with trusted():
        pool = PinnedPool(int(gib * GIB)).tensor()
    numbers = pool[: pool.numel() // 8 * 8].view(torch.int64)
    torch.arange(numbers.numel(), out=numbers)
    return pool


def rows_of(pool: torch.Tensor, gib: float, row_bytes: int) -> torch.Tensor:
    count = int(gib * GIB) // row_bytes
    return pool[: count * row_bytes].view(count, row_bytes)


def distinct(rows: int, count: int, device: str) -> torch.Tensor:
    if rows < 1 << 28:
        return torch.randperm(rows, device=device)[:count]
    found = torch.randint(0, rows, (count + count // 64,), device=device).unique()
    return found[torch.randperm(found.numel(), device=device)[:count]]
