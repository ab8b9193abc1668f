"""OffloadEngine on a GPU: streams, graphs, nothing that waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import BLOCKS, SLOTS, Model, engine_of

import jitkern
from jitkern.offload import PinnedPool

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_nothing_waits(layout: str) -> None:
    device = torch.device("cuda")
    with engine_of(device, layout=layout) as engine:
        on_gpu = torch.tensor([3, 1], device=device)
        stream = torch.cuda.Stream()

        def moves() -> None:
            for where in (None, stream):
                with torch.cuda.stream(where):
                    engine.load(0, 1)
                    engine.load(0, 1, layer=1)
                    engine.store(0, 1)
                    engine.store(0, 1, num_tokens=5)
                    engine.load([2, 3], [5, 1])
                    engine.load(on_gpu, on_gpu)
                    engine.store(on_gpu, on_gpu, layer=2)

        moves()  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        asleep = torch.cuda.Event()
        asleep.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            moves()
            assert not asleep.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        jitkern.check(device)


def test_streams() -> None:
    """A copy goes behind what is on its stream, and on no other."""
    device = torch.device("cuda")
    with engine_of(device) as engine:
        engine.cpu_k.fill_(1)
        engine.load(0, 0)
        stream = torch.cuda.Stream()
        engine.gpu_k.add_(0)  # what is loaded at its first use may wait for the GPU
        for where in (None, stream):  # compiles, and allocates
            with torch.cuda.stream(where):
                engine.store(0, 2)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            engine.gpu_k.add_(1)
            engine.store(0, 1)
        engine.store(0, 2)
        torch.cuda.current_stream().synchronize()
        assert engine.cpu_k[:, 2].eq(1).all() and not stream.query()
        stream.synchronize()
        assert engine.cpu_k[:, 1].eq(2).all()
        engine.gpu_k.fill_(7)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            engine.store_all(3)  # waits, for this stream
            assert stream.query() and engine.cpu_k[:, 3 : 3 + SLOTS].eq(7).all()


def test_numbers_on_the_gpu_out_of_range() -> None:
    device = torch.device("cuda")
    with engine_of(device) as engine:
        model = Model(engine)
        blocks = torch.tensor([4, -1, BLOCKS, 2], device=device)
        slots = torch.tensor([0, 1, 2, SLOTS], device=device)
        engine.load(slots, blocks)
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=r": pairs\["):
            jitkern.check(device)
        model.load(0, 4)
        model.check()


def test_in_a_graph() -> None:
    """Numbers on the GPU are read at each replay; by the engine those of the host are kept."""
    device = torch.device("cuda")
    for method in ("sm", "engine"):
        with engine_of(device, method=method) as engine:
            engine.cpu_cache.copy_(torch.randn(engine.cpu_cache.shape))
            numbers: Any = ([0, 1], [2, 3])
            if method == "sm":
                numbers = tuple(torch.tensor(one, device=device) for one in numbers)
            engine.load(*numbers)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                engine.load(*numbers)
            engine.gpu_cache.zero_()
            if method == "sm":
                numbers[1].add_(4)
            graph.replay()
            torch.cuda.synchronize()
            first = 6 if method == "sm" else 2
            for slot, block in ((0, first), (1, first + 1)):
                assert torch.equal(engine.gpu_k[:, slot].cpu(), engine.cpu_k[:, block])
                assert torch.equal(engine.gpu_v[:, slot].cpu(), engine.cpu_v[:, block])
            del graph


def test_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        pool = PinnedPool(1 << 20)
    text = "OffloadEngine: pool: pageable memory, expected an open pool, made where CUDA is"
    with pytest.raises(ValueError, match=f"^{text}$"):
        engine_of(torch.device("cuda"), pool=pool)
    pool.close()
    closed_later = PinnedPool(1 << 20)
    with engine_of(torch.device("cuda"), pool=closed_later) as engine:
        closed_later.close()
        with pytest.raises(ValueError, match=r": src: "):
            engine.load(0, 0)


@pytest.mark.multigpu
def test_another_gpu() -> None:
    with engine_of(torch.device("cuda:0")) as engine:
        engine.cpu_cache.fill_(3)
        with pytest.raises(ValueError, match=r"blocks: cuda:1, expected a tensor on cuda:0$"):
            engine.load(torch.tensor([0], device="cuda:0"), torch.tensor([0], device="cuda:1"))
        with torch.cuda.device(1):  # the engine's own GPU is the one that counts
            engine.load(0, 0)
        torch.cuda.synchronize(0)
        assert engine.gpu_k[:, 0].eq(3).all()
