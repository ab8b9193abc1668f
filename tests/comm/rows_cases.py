"""Calls of peer_gather and peer_scatter: a host pool, memory of each rank, and pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

UNTOUCHED = 0xA5


@dataclass
class Case:
    """Rows of a host pool, and memory of each rank."""

    row_bytes: int
    num_host_rows: int
    num_rows: int
    stride_bytes: int  # of each rank's rows
    pairs: Tensor  # (row of the pool, row of a rank)

    def pool(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_host_rows)
        shape = (self.num_host_rows, self.row_bytes)
        pool = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return pool.pin_memory() if device.type == "cuda" else pool

    def caches(self, size: int, device: torch.device) -> list[Tensor]:
        shape = (self.num_rows, self.stride_bytes)
        return [
            torch.full(shape, UNTOUCHED, dtype=torch.uint8, device=device)[:, : self.row_bytes]
            for _ in range(size)
        ]

    def valid(self) -> list[tuple[int, int]]:
        return [
            (a, b)
            for a, b in self.pairs.view(-1, 2).tolist()
            if 0 <= a < self.num_host_rows and 0 <= b < self.num_rows
        ]


def any_case(
    rng: random.Random, *, repeats: bool, row_bytes: int | None = None, count: int | None = None
) -> Case:
    row_bytes = row_bytes or rng.choice([1, 6, 16, 24, 128, 656, 1000])
    count = count or rng.choice([1, 2, 3, 50, 700])
    num_host_rows = rng.choice([1, 3, count, 40 * count]) if repeats else 3 * count
    num_rows = count + rng.randrange(50)
    hosts = [rng.randrange(num_host_rows) for _ in range(count)]
    if not repeats:
        hosts = rng.sample(range(num_host_rows), count)
    rows = rng.sample(range(num_rows), count)
    pairs = torch.tensor(list(zip(hosts, rows, strict=True)))
    for _ in range(rng.choice([0, 0, 3])):
        pairs[rng.randrange(count), rng.randrange(2)] = -rng.randrange(1, 5)
    stride_bytes = row_bytes + rng.choice([0, 16, 5])
    return Case(row_bytes, num_host_rows, num_rows, stride_bytes, pairs)
