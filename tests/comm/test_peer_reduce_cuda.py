"""PeerReducer's kernels with all ranks in this process: on streams of one GPU, or on two GPUs.

Other tests' ranks are forked, and under compute-sanitizer ended in a segmentation fault or came too
late. This is for it:
``python tests/sanitize.py memcheck -k "one_process and not graph and not gpus"``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from needs import needs_cxx
from rows_ranks import Ranks, any_call

from jitkern.errors import CommTimeoutError

pytestmark = [needs_cxx, pytest.mark.cuda]
Make = Callable[..., Ranks]


@pytest.fixture(
    params=["streams-2", "streams-4", pytest.param("gpus-2", marks=pytest.mark.multigpu)]
)
def make(request: pytest.FixtureRequest) -> Make:
    kind, size = request.param.split("-")
    return partial(Ranks, int(size), torch.device("cuda"), slot_bytes=500, has_gpus=kind == "gpus")


def ones(ranks: Ranks, count: int) -> list[torch.Tensor]:
    tensors = [torch.ones(count, device=reducer.device) for reducer in ranks.reducers]
    ranks.finish()
    return tensors


def sum_all(ranks: Ranks, xs: list[torch.Tensor]) -> None:
    ranks.each(lambda rank: ranks.reducers[rank].all_reduce(xs[rank]), wait=False)


def test_calls_of_one_process(make: Make) -> None:
    """Of all kinds, sizes and alignments; nothing is allocated or loaded while ranks wait."""
    ranks, loading = make(), make(device_timeout_s=1e-4)
    for seed in range(60):
        for rank, reducer in enumerate(loading.reducers):
            call = any_call(reducer, random.Random(seed))
            with torch.cuda.stream(loading.streams[rank]):
                call.run()
            loading.reset()
        calls = [any_call(reducer, random.Random(seed)) for reducer in ranks.reducers]
        ranks.each(lambda rank, calls=calls: calls[rank].run(), wait=False)
        for call in calls:
            call.check()


def test_a_late_rank_of_one_process(make: Make) -> None:
    loading = make()  # loading takes longer than the deadline below
    sum_all(loading, ones(loading, 500))
    ranks = make(device_timeout_s=0.5)
    xs = ones(ranks, 500)
    with torch.cuda.stream(ranks.streams[0]):
        ranks.reducers[0].all_reduce(xs[0])
        ranks.finish()
        with pytest.raises(CommTimeoutError, match="call 1 of rank 0") as raised:
            ranks.reducers[0].all_reduce(xs[0])
    assert raised.value.missing == tuple(range(1, ranks.size))
    ranks.reset()
    xs = ones(ranks, 500)
    sum_all(ranks, xs)
    assert all(bool((x == ranks.size).all()) for x in xs)


def test_graphs_of_one_process(make: Make) -> None:
    """Of three calls, so that replays begin in turn in an even and in an odd epoch."""
    ranks = make()
    of_calls = [ones(ranks, count) for count in (1000, 8, 100_000)]
    for xs in of_calls:  # kernels are loaded in front of the capture
        sum_all(ranks, xs)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.stream(stream), torch.cuda.graph(graphs[-1], stream=stream):
            for xs in of_calls:
                ranks.reducers[rank].all_reduce(xs[rank])
    for _ in range(5):
        for x in (x for xs in of_calls for x in xs):
            x.fill_(1)
        ranks.each(lambda rank: graphs[rank].replay(), wait=False)
        assert all(bool((x == ranks.size).all()) for xs in of_calls for x in xs)
