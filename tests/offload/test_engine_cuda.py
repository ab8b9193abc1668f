"""OffloadEngine on a GPU: streams, graphs, nothing that waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import BLOCKS, SLOTS, Model, engine_of

import jitkern

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_nothing_waits(layout: str) -> None:
    device = torch.device("cuda")
    with engine_of(device, layout=layout) as engine:
        on_gpu = torch.tensor([3, 1], device=device)
        stream = torch.cuda.Stream()

        def moves() -> None:
            for how in ({}, {"stream": stream}):
                engine.load_to_slot_all_layers(0, 1, **how)
                engine.load_to_slot(0, 1, layer=1, **how)
                engine.offload_slot_to_cpu(0, 1, **how)
                engine.offload_decode_slot(0, 1, 5, **how)
                engine.load_cpu_blocks_to_gpu_slots_all_layers([5, 1], [2, 3], **how)
                engine.load_cpu_blocks_to_gpu_slots_all_layers(on_gpu, on_gpu, **how)
                engine.offload_gpu_slots_to_cpu_blocks(on_gpu, on_gpu, layer=2, **how)

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
        engine.load_to_slot_all_layers(0, 0)
        stream = torch.cuda.Stream()
        engine.gpu_k.add_(0)  # what is loaded at its first use may wait for the GPU
        for where in (None, stream):  # compiles, and allocates
            engine.offload_slot_to_cpu(0, 2, stream=where)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            engine.gpu_k.add_(1)
        engine.offload_slot_to_cpu(0, 1, stream=stream)
        engine.offload_slot_to_cpu(0, 2)
        torch.cuda.current_stream().synchronize()
        assert engine.cpu_k[:, 2].eq(1).all() and not stream.query()
        stream.synchronize()
        assert engine.cpu_k[:, 1].eq(2).all()
        engine.gpu_k.fill_(7)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            engine.offload_all(3)  # waits, for this stream
            assert stream.query() and engine.cpu_k[:, 3 : 3 + SLOTS].eq(7).all()


def test_numbers_on_the_gpu_out_of_range() -> None:
    device = torch.device("cuda")
    with engine_of(device) as engine:
        model = Model(engine)
        blocks = torch.tensor([4, -1, BLOCKS, 2], device=device)
        slots = torch.tensor([0, 1, 2, SLOTS], device=device)
        engine.load_cpu_blocks_to_gpu_slots_all_layers(blocks, slots)
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
            numbers: Any = ([2, 3], [0, 1])
            if method == "sm":
                numbers = tuple(torch.tensor(one, device=device) for one in numbers)
            engine.load_cpu_blocks_to_gpu_slots_all_layers(*numbers)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                engine.load_cpu_blocks_to_gpu_slots_all_layers(*numbers)
            engine.gpu_cache.zero_()
            if method == "sm":
                numbers[0].add_(4)
            graph.replay()
            torch.cuda.synchronize()
            first = 6 if method == "sm" else 2
            for slot, block in ((0, first), (1, first + 1)):
                assert torch.equal(engine.gpu_k[:, slot].cpu(), engine.cpu_k[:, block])
                assert torch.equal(engine.gpu_v[:, slot].cpu(), engine.cpu_v[:, block])
            del graph
