"""SlotPipeline on a GPU: races with slow copies and bodies, graphs, no synchronisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import bring, no_synchronisation, pipeline_of, take
from torch import Tensor

from jitkern.offload import OverlapMonitor, SlotPipeline

pytestmark = pytest.mark.cuda

WORDS = 1 << 18  # of int32: 1 MiB a slot
SLOW_CYCLES = 1_000_000  # about 0.6 ms


def pipeline(depth: int, device: str = "cuda", **how: Any) -> SlotPipeline:
    how = {"slot_shape": [WORDS], "dtype": torch.int32, **how}
    return pipeline_of(torch.device(device), depth, **how)


def pinned(count: int) -> list[Tensor]:
    return [torch.full([WORDS], n, dtype=torch.int32, pin_memory=True) for n in range(count)]


def slow(copy: Any) -> Any:
    """Return a copy that begins late, and pauses when half of the slot is copied."""

    def run(tensor: Tensor, block: Tensor) -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        copy(tensor[: WORDS // 2], block[: WORDS // 2])
        torch.cuda._sleep(SLOW_CYCLES)
        copy(tensor[WORDS // 2 :], block[WORDS // 2 :])

    return run


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("slow_side", ["copies", "bodies", "both"])
def test_slow_sides(depth: int, slow_side: str) -> None:
    p = pipeline(depth)
    blocks = pinned(24)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    load, store = (slow(bring), slow(take)) if slow_side != "bodies" else (bring, take)
    for turn in range(3):
        for number, slot in enumerate(p.update(blocks, load=load, store=store)):
            wrong += (slot.tensor != number + turn).sum()
            if slow_side != "copies":
                torch.cuda._sleep(SLOW_CYCLES)
            slot.tensor.add_(1)
            if slow_side != "copies":
                torch.cuda._sleep(SLOW_CYCLES)
        # The caller's stream waits for the stores, so its copies of host memory see them.
        seen = torch.stack([block.cuda(non_blocking=True) for block in blocks])
        wrong += (seen != torch.arange(24, device="cuda")[:, None] + turn + 1).sum()
        for number, slot in enumerate(p.load(blocks, copy=load)):
            torch.cuda._sleep(SLOW_CYCLES if slow_side != "copies" else 0)
            wrong += (slot.tensor != number + turn + 1).sum()
    assert wrong.item() == 0


def test_results_outlive_the_pipeline() -> None:
    """The allocator does not reuse memory of closed slots before their queued work has ended."""
    blocks = pinned(4)
    for _ in range(10):
        p = pipeline(4)
        totals = []
        for slot in p.load(blocks, copy=slow(bring)):
            torch.cuda._sleep(SLOW_CYCLES)
            totals.append(slot.tensor.sum())
        p.close()
        del p, slot
        others = [torch.full([WORDS], -1, dtype=torch.int32, device="cuda") for _ in range(8)]
        assert [total.item() for total in totals] == [n * WORDS for n in range(4)]
        assert all(other.eq(-1).all() for other in others)


@pytest.mark.parametrize("monitored", [False, True])
def test_nothing_is_synchronised(monitored: bool) -> None:
    monitor = OverlapMonitor(num_timed_iterations=8) if monitored else None
    p, blocks = pipeline(3, monitor=monitor), pinned(40)
    with no_synchronisation():
        for _ in p.load(blocks, copy=bring):
            torch.cuda._sleep(1000)
        with p:
            for _ in p.update(blocks, load=bring, store=take):
                torch.cuda._sleep(1000)
            for _ in p.store(blocks, copy=take):
                pass
        if monitor is not None:
            monitor.stats()
    torch.cuda.synchronize()
    if monitor is not None:
        assert monitor.stats().num_iterations == 120


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_in_a_graph(depth: int, mode: str) -> None:
    """After eager runs, before them, and between captures; contents change between replays."""
    p = pipeline(depth, monitor=OverlapMonitor())
    blocks = pinned(6)
    total = torch.zeros((), dtype=torch.int64, device="cuda")

    def run() -> None:
        for slot in p.update(blocks, load=bring, store=take):
            slot.tensor.add_(1)
            total.add_(slot.tensor.sum())

    for block in blocks:
        block.zero_()
    run()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            run()
        graphs.append(graph)
    torch.cuda.synchronize()
    assert total.item() == 6 * WORDS
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        run()
    torch.cuda.synchronize()
    assert all(block.eq(10).all() for block in blocks)
    assert total.item() == 6 * WORDS * sum(range(1, 11))
    assert p._monitor.stats().num_iterations == 24  # type: ignore[union-attr]


def test_a_capture_inside_a_session_is_refused() -> None:
    p = pipeline(2)
    blocks = pinned(2)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with p:
        with (
            torch.cuda.graph(graph),
            pytest.raises(RuntimeError, match="torch's current stream is another one"),
        ):
            x.add_(1)
            next(iter(p.load(blocks, copy=bring)))
        for _ in p.load(blocks, copy=bring):
            pass
    torch.cuda.synchronize()


@pytest.mark.multigpu
def test_on_another_gpu() -> None:
    p = pipeline(2, device="cuda:1")
    blocks = pinned(5)
    assert torch.cuda.current_device() == 0
    here, there = torch.cuda.current_stream(0), torch.cuda.current_stream(1)
    total = torch.zeros((), dtype=torch.int64, device="cuda:1")
    for slot in p.load(blocks, copy=bring):
        assert torch.cuda.current_device() == 1
        total += slot.tensor.sum()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(0) == here and torch.cuda.current_stream(1) == there
    assert total.item() == 10 * WORDS
