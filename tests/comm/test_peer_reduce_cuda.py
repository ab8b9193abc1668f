"""PeerReducer's kernels with all ranks in this process: on streams of one GPU, or on two GPUs.

Other tests' ranks are forked, and under compute-sanitizer ended in a segmentation fault or came too
late. This is for it:
``python tests/sanitize.py memcheck -k "one_process and not graph and not gpus"``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from needs import needs_cxx
from reduce_calls import any_call
from torch.distributed import HashStore

from jitkern.comm import PeerMemory, PeerReducer
from jitkern.errors import CommTimeoutError

pytestmark = [needs_cxx, pytest.mark.cuda]
SLOT_FOR_BYTES = 500  # the largest calls take several rounds


class Ranks:
    """Reducers, each with a stream of its own."""

    def __init__(self, size: int, has_gpus: bool, deadline_s: float = 20.0) -> None:
        num_bytes = PeerReducer.workspace_bytes_for(size, SLOT_FOR_BYTES)
        devices = [torch.device("cuda", rank if has_gpus else 0) for rank in range(size)]
        kept: Any
        if has_gpus:
            store = HashStore()

            def join(rank: int) -> PeerMemory:
                return PeerMemory(num_bytes, store, rank=rank, size=size, device=devices[rank])

            with ThreadPoolExecutor(size) as threads:
                kept = list(threads.map(join, range(size)))
            addresses = [one.addresses for one in kept]  # of each rank as it sees them
        else:
            kept = [torch.empty(num_bytes, dtype=torch.uint8, device=one) for one in devices]
            addresses = size * [[one.data_ptr() for one in kept]]
        self.reducers = [
            PeerReducer(
                *(addresses[rank], rank, size, num_bytes),
                device=device, deadline_s=deadline_s, owner=kept,
            )
            for rank, device in enumerate(devices)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream(device) for device in devices]
        self.reset()

    def reset(self) -> None:
        self.finish()
        for one in self.reducers:
            one.reset()

    def finish(self) -> None:
        for one in self.reducers:
            one.synchronize()

    @contextmanager
    def on(self, rank: int) -> Iterator[PeerReducer]:
        with torch.cuda.device(self.reducers[rank].device), torch.cuda.stream(self.streams[rank]):
            yield self.reducers[rank]

    def sum_all(self, xs: list[torch.Tensor]) -> None:
        for rank, x in enumerate(xs):
            with self.on(rank) as reducer:
                reducer.all_reduce(x)

    def ones(self, count: int) -> list[torch.Tensor]:
        made = [torch.ones(count, device=one.device) for one in self.reducers]
        self.finish()
        return made


@pytest.fixture(
    params=["streams-2", "streams-4", pytest.param("gpus-2", marks=pytest.mark.multigpu)]
)
def kind(request: pytest.FixtureRequest) -> tuple[int, bool]:
    what, size = request.param.split("-")
    return int(size), what == "gpus"


def test_calls_of_one_process(kind: tuple[int, bool]) -> None:
    """Of all kinds, sizes and alignments; nothing is allocated or loaded while ranks wait."""
    ranks, loading = Ranks(*kind), Ranks(*kind, deadline_s=1e-4)
    for seed in range(60):
        for rank, one in enumerate(loading.reducers):
            call = any_call(one, random.Random(seed))
            with loading.on(rank):
                call.run()
            loading.reset()
        calls = [any_call(one, random.Random(seed)) for one in ranks.reducers]
        ranks.finish()
        for rank, call in enumerate(calls):
            with ranks.on(rank):
                call.run()
        ranks.finish()
        for call in calls:
            call.check()


def test_a_late_rank_of_one_process(kind: tuple[int, bool]) -> None:
    size, _ = kind
    loading = Ranks(*kind)  # which takes longer than the deadline below
    loading.sum_all(loading.ones(500))
    ranks = Ranks(*kind, deadline_s=0.5)
    xs = ranks.ones(500)
    with ranks.on(0) as reducer:
        reducer.all_reduce(xs[0])
        ranks.finish()
        with pytest.raises(CommTimeoutError, match="call 1 of rank 0") as raised:
            reducer.all_reduce(xs[0])
    assert raised.value.missing == tuple(range(1, size))
    ranks.reset()
    xs = ranks.ones(500)
    ranks.sum_all(xs)
    ranks.finish()
    assert all(bool((x == size).all()) for x in xs)


def test_graphs_of_one_process(kind: tuple[int, bool]) -> None:
    """Of three calls, so that replays begin in turn in an even and in an odd epoch."""
    ranks = Ranks(*kind)
    of_calls = [ranks.ones(count) for count in (1000, 8, 100_000)]
    for xs in of_calls:  # kernels are loaded in front of the capture
        ranks.sum_all(xs)
    ranks.finish()
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with ranks.on(rank) as reducer, torch.cuda.graph(graphs[-1], stream=stream):
            for xs in of_calls:
                reducer.all_reduce(xs[rank])
    for _ in range(5):
        for x in (x for xs in of_calls for x in xs):
            x.fill_(1)
        ranks.finish()
        for rank, graph in enumerate(graphs):
            with ranks.on(rank):
                graph.replay()
        ranks.finish()
        assert all(bool((x == len(xs)).all()) for xs in of_calls for x in xs)
