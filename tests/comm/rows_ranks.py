"""Ranks of one process, threads on the CPU or streams of one GPU, and calls of peer_gather."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitkern.comm import PeerReducer

Call = Callable[[int], Any]


class Ranks:
    """Of one device. Their kernels wait for each other, so that they have to be there at once."""

    def __init__(
        self, size: int, device: torch.device, deadline_s: float = 20.0, slot_bytes: int = 64
    ) -> None:
        self.size, self.device = size, device
        num_bytes = PeerReducer.workspace_bytes_for(size, slot_bytes)
        self.memory = torch.full((size, num_bytes + 16), 0xFF, dtype=torch.uint8, device=device)
        places = [(one.data_ptr() + 15) // 16 * 16 for one in self.memory]
        self.reducers = [
            PeerReducer(places, rank, size, num_bytes, device=device, deadline_s=deadline_s)
            for rank in range(size)
        ]
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream(device) for _ in range(size)]

    def each(self, call: Call, ranks: list[int] | None = None, *, wait: bool = True) -> list[Any]:
        """Have `call` made of each rank's number, at the same time; return what they return.

        On a GPU all calls are made in front of what the first of them finds, if they are to `wait`.
        """
        numbers = list(range(self.size)) if ranks is None else ranks
        if self.device.type == "cpu":
            with ThreadPoolExecutor(self.size) as threads:
                return [one.result() for one in [threads.submit(call, rank) for rank in numbers]]
        torch.cuda.synchronize()
        found = []
        for rank in numbers if wait else ():
            with torch.cuda.stream(self.streams[rank]):
                torch.cuda._sleep(20_000_000)  # cycles, of some 2 GHz
        for rank in numbers:
            with torch.cuda.stream(self.streams[rank]):
                found.append(call(rank))
        torch.cuda.synchronize()
        return found

    def errors(
        self, call: Call, ranks: list[int] | None = None, *, wait: bool = True
    ) -> list[Exception | None]:
        """The same; return what each has raised."""

        def caught(rank: int) -> Exception | None:
            try:
                call(rank)
            except Exception as error:
                return error
            return None

        return self.each(caught, ranks, wait=wait)


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
