"""Ranks that are threads of one process, and a rank whose others are silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from jitkern.nn import TPEmbedding

T = TypeVar("T")
TIMEOUT_S = 60.0


class Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.store = HashStore()  # peer memory meets over it
        self.barrier = threading.Barrier(size)
        self.inputs: list[Any] = [None] * size


class ThreadComm:
    """One rank, with the parts of a communicator that ``TPEmbedding`` uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, meeting.size
        self.sent: list[tuple[torch.dtype, int]] = []

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        assert op == "sum" and x.is_contiguous()
        self.sent.append((x.dtype, x.numel()))
        meeting = self.meeting
        meeting.inputs[self.rank] = x.cpu().clone()
        meeting.barrier.wait(TIMEOUT_S)
        first, *rest = meeting.inputs
        meeting.barrier.wait(TIMEOUT_S)
        for other in rest:
            assert (other.dtype, other.shape) == (x.dtype, x.shape)
        x.copy_(sum(rest, first))


class SilentComm:
    """A rank of several, whose others send zeros: as where they hold none of the ids."""

    def __init__(self, rank: int = 0, world_size: int = 2) -> None:
        self.rank, self.world_size = rank, world_size
        self.sent: list[tuple[torch.dtype, int]] = []

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        assert type(x) is Tensor and op == "sum"
        x.data_ptr()
        self.sent.append((x.dtype, x.numel()))


def each(values: Sequence[Any], body: Callable[[Any], T], meeting: Meeting) -> list[T]:
    def run(value: Any) -> T:
        try:
            return body(value)
        except BaseException:
            meeting.barrier.abort()  # others do not wait for this one
            raise

    with ThreadPoolExecutor(len(values)) as pool:
        futures = [pool.submit(run, value) for value in values]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class Way:
    """How ranks get rows, "all_reduce" or "peer", and on which devices."""

    def __init__(self, algorithm: str, kind: str) -> None:
        self.algorithm, self.kind = algorithm, kind

    def device(self, rank: int) -> torch.device:
        number = rank if self.kind == "cuda" and self.algorithm == "peer" else None
        return torch.device(self.kind) if number is None else torch.device(self.kind, number)

    def ranks(self, size: int, vocab: int, hidden: int, **options: Any) -> Ranks:
        meeting = Meeting(size)

        def make(rank: int) -> TPEmbedding:
            config = {"device": self.device(rank), "algorithm": self.algorithm, "timeout_s": 20}
            comm, group = ThreadComm(meeting, rank), meeting.store
            return TPEmbedding(vocab, hidden, comm=comm, group=group, **(config | options))

        return Ranks(meeting, each(range(size), make, meeting))

    def ranks_of(self, size: int, table: Tensor, **options: Any) -> Ranks:
        rows = len(table) - options.get("num_added", 0)
        ranks = self.ranks(size, rows, table.shape[1], dtype=table.dtype, **options)
        ranks.each(lambda module: module.load_full(table))
        return ranks


class Ranks:
    def __init__(self, meeting: Meeting, modules: list[TPEmbedding]) -> None:
        self.meeting, self.modules = meeting, modules

    def each(self, body: Callable[[TPEmbedding], T]) -> list[T]:
        return each(self.modules, body, self.meeting)

    def num_sums(self) -> int:
        (count,) = {len(module.comm.sent) for module in self.modules}  # type: ignore[attr-defined]
        return count

    def whole(self, parts: Sequence[Tensor] | None = None) -> Tensor:
        """Return the table of all parts; each row is held once, and zeros follow."""
        parts = parts or [module.weight.detach() for module in self.modules]
        base, added = [], []
        for part, module in zip(parts, self.modules, strict=True):
            first, second = module.vocab_range[1], module.added_range[1]
            base.append(part[:first].cpu())
            added.append(part[first : first + second].cpu())
            assert not part[first + second :].contiguous().view(torch.uint8).any()
        return torch.cat(base + added)
