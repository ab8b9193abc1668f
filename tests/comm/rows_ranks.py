"""Ranks of one process, threads on the CPU or streams of one GPU, and random calls of theirs."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from jitkern.comm import PeerMemory, PeerReducer

Call = Callable[[int], Any]


def memories(num_bytes: int, devices: list[torch.device]) -> list[PeerMemory]:
    store, size = HashStore(), len(devices)

    def make(rank: int) -> PeerMemory:
        options: Any = {"rank": rank, "world_size": size, "device": devices[rank], "timeout_s": 20}
        return PeerMemory(num_bytes, store, **options)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(make, range(size)))


class Ranks:
    """Reducers on one device or several GPUs. Their kernels wait for each other."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        device_timeout_s: float = 20.0,
        slot_bytes: int = 64,
        has_gpus: bool = False,
    ) -> None:
        self.size, self.device = size, device
        num_bytes = PeerReducer.workspace_bytes_for(size, slot_bytes)
        devices = [torch.device("cuda", rank) if has_gpus else device for rank in range(size)]
        options: dict[str, Any] = {"device_timeout_s": device_timeout_s}
        if has_gpus:
            options["owner"] = memories(num_bytes, devices)
            addresses = [memory.addresses for memory in options["owner"]]
        else:
            self.memory = torch.full((size, num_bytes + 16), 0xFF, dtype=torch.uint8).to(device)
            addresses = size * [[(part.data_ptr() + 15) // 16 * 16 for part in self.memory]]
            options["owner"], self.addresses = self.memory, addresses[0]
        self.reducers = [
            PeerReducer(addresses[rank], rank, size, num_bytes, device=devices[rank], **options)
            for rank in range(size)
        ]
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream(device) for device in devices]
            self.reset()

    def finish(self) -> None:
        for reducer in self.reducers:
            reducer._synchronize()

    def reset(self) -> None:
        self.finish()
        for reducer in self.reducers:
            reducer.reset()

    def each(self, call: Call, ranks: list[int] | None = None, *, wait: bool = True) -> list[Any]:
        """Call `call(rank)` for all ranks at the same time; return the results.

        On a GPU all calls are made before any kernel of theirs runs, if they are to `wait`.
        """
        numbers = list(range(self.size)) if ranks is None else ranks
        if self.device.type == "cpu":
            with ThreadPoolExecutor(self.size) as threads:
                return list(threads.map(call, numbers))
        self.finish()
        results = []
        for rank in numbers if wait else ():
            with torch.cuda.stream(self.streams[rank]):
                torch.cuda._sleep(20_000_000)  # cycles, of some 2 GHz
        for rank in numbers:
            with torch.cuda.stream(self.streams[rank]):
                results.append(call(rank))
        self.finish()
        return results

    def errors(
        self, call: Call, ranks: list[int] | None = None, *, wait: bool = True
    ) -> list[Exception | None]:
        """Return the error of each rank's call, or None."""

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
    row_bytes: int
    num_host_rows: int
    num_rows: int
    stride_bytes: int  # between the rows of a rank
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


def any_case(rng: random.Random, *, repeats: bool) -> Case:
    row_bytes = rng.choice([1, 6, 16, 24, 128, 656, 1000])
    count = rng.choice([1, 2, 3, 50, 700])
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


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("auto", "one_shot", "two_shot")
MOST_ITEMS = 3000  # beyond what the slots hold: several rounds


def values(rng: random.Random, count: int, dtype: torch.dtype) -> Tensor:
    """Any bits, among them NaN, infinity, and what a workspace holds where nothing has come."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    words = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    words[: rng.choice([0, 16])] = 0xFF
    return words.view(dtype)


@dataclass
class Made:
    """A call to make, its output, and the expected output."""

    run: Callable[[], object]
    text: str
    out: Tensor
    expected: Tensor

    def check(self) -> None:
        assert is_same(self.out.cpu(), self.expected), self.text


def any_call(reducer: PeerReducer, rng: random.Random) -> Made:
    """One that all ranks make, from the same random numbers."""
    size, rank, dtype = reducer.world_size, reducer.rank, rng.choice(DTYPES)

    def unaligned(count: int) -> Tensor:
        shift = rng.choice([0, 0, 1, 3])
        return torch.zeros(count + shift, dtype=dtype, device=reducer.device)[shift:]

    count = rng.choice([1, rng.randrange(64), rng.randrange(MOST_ITEMS)])
    op = rng.choice(["all_reduce", "all_reduce", "out", "reduce_scatter", "own part", "barrier"])
    if op == "barrier":
        return Made(reducer.device_barrier, op, torch.zeros(0), torch.zeros(0))
    whole = count * (size if op in ("reduce_scatter", "own part") else 1)
    inputs = [values(rng, whole, dtype) for _ in range(size)]
    x = unaligned(whole)
    x.copy_(inputs[rank])
    expected, text = summed(inputs), f"{op} of {count} {dtype}"
    if op in ("all_reduce", "out"):
        out = x if op == "all_reduce" else unaligned(whole)
        run = partial(reducer.all_reduce, x, output=out, algorithm=rng.choice(ALGORITHMS))
        return Made(run, text, out, expected)
    own = slice(rank * count, (rank + 1) * count)
    out = x[own] if op == "own part" else unaligned(count)
    return Made(partial(reducer.reduce_scatter, out, x), text, out, expected[own])


def summed(inputs: list[Tensor]) -> Tensor:
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return total.to(inputs[0].dtype)


def is_same(out: Tensor, expected: Tensor) -> bool:
    """All bits of numbers; of a NaN that it is one."""
    are_nan = expected.isnan()
    as_integers = torch.int32 if out.dtype == torch.float32 else torch.int16
    bits = (x.clone().masked_fill_(are_nan, 0).view(as_integers) for x in (out, expected))
    return torch.equal(out.isnan(), are_nan) and torch.equal(*bits)
