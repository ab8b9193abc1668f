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
    """Where the ranks of a run exchange what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = HashStore()  # for peer memory
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size


class ThreadComm:
    """One rank: what ``TPEmbedding`` needs of a communicator."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.sent: list[tuple[torch.dtype, int]] = []

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        assert op == "sum" and x.is_contiguous()
        self.sent.append((x.dtype, x.numel()))
        meeting = self.meeting
        meeting.given[self.rank] = x.cpu().clone()
        meeting.barrier.wait(TIMEOUT_S)
        first, *rest = meeting.given
        meeting.barrier.wait(TIMEOUT_S)
        for other in rest:
            assert (other.dtype, other.shape) == (x.dtype, x.shape)
        x.copy_(sum(rest, first))


class SilentComm:
    """A rank of several, whose others send zeros: as where they hold none of the ids."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.sent: list[tuple[torch.dtype, int]] = []

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        assert type(x) is Tensor and op == "sum"
        x.data_ptr()
        self.sent.append((x.dtype, x.numel()))


def each(
    values: Sequence[Any], body: Callable[[Any], T], meeting: Meeting | None = None
) -> list[T]:
    """Return what `body` makes of each value, in threads; raise the first error."""

    def run(value: Any) -> T:
        try:
            return body(value)
        except BaseException:
            if meeting is not None:
                meeting.barrier.abort()  # others do not wait for this one
            raise

    with ThreadPoolExecutor(len(values)) as pool:
        futures = [pool.submit(run, value) for value in values]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def on_ranks(size: int, body: Callable[[ThreadComm], T]) -> list[T]:
    """Return what each rank's `body` does."""
    meeting = Meeting(size)
    return each([ThreadComm(meeting, rank) for rank in range(size)], body, meeting)


def embedding_of(table: Tensor, comm: Any, **options: Any) -> TPEmbedding:
    """Return the module of a whole table, on its device and of its dtype."""
    rows = len(table) - options.get("num_added", 0)
    given = {"comm": comm, "dtype": table.dtype, "device": table.device, **options}
    module = TPEmbedding(rows, table.shape[1], **given)
    module.load_full(table)
    return module


def whole_of(parts: Sequence[Tensor], modules: Sequence[TPEmbedding]) -> Tensor:
    """Put the table of all ranks together again, and see that nothing is behind its rows."""
    base, added = [], []
    for part, module in zip(parts, modules, strict=True):
        first, second = module.vocab_range[1], module.added_range[1]
        base.append(part[:first])
        added.append(part[first : first + second])
        assert not part[first + second :].any()
    return torch.cat(base + added)
