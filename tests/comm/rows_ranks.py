"""Ranks of one process: threads on the CPU, streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from jitkern.comm import PeerReducer

Call = Callable[[int], Any]


class Ranks:
    """Of one device. Their kernels wait for each other, so that they have to be there at once."""

    def __init__(self, size: int, device: torch.device, deadline_s: float = 20.0) -> None:
        self.size, self.device = size, device
        num_bytes = PeerReducer.workspace_bytes_for(size, 64)
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
