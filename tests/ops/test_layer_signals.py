"""LayerSignals: flags that tell which layers of a copy have arrived."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from buffers import synchronize
from test_block_buffers import (
    BLOCKS,
    HOST_BLOCKS,
    LAYERS,
    make_list,
    make_page_first,
    make_pairs,
    sides,
)
from test_copy_blocks import CPU

from jitkern import BlockBuffers, LayerSignals, copy_blocks


@pytest.mark.parametrize("num_signals", [LAYERS, 1])
def test_signals(device: torch.device, num_signals: int) -> None:
    """Each layer is there once its signal is; a stream that waits reads the new bytes."""
    src, _, _, _ = sides(device, "h2d", make_page_first, 4096)
    layers = make_list(device, 4096)[1]
    dst, seen = BlockBuffers(layers), [torch.empty_like(layer) for layer in layers]
    signals = LayerSignals(num_signals, device=device)
    assert not signals.is_done(0)
    assert repr(signals) == f"LayerSignals(0 of {num_signals} layers done, on {signals.device})"
    with pytest.raises(RuntimeError, match=r"LayerSignals.wait: no copy was queued"):
        signals.wait(0)
    on_gpu = device.type == "cuda"
    copies, compute = [torch.cuda.Stream() if on_gpu else None for _ in range(2)]
    for method, on in itertools.product(("auto", "sm"), (CPU, device)):
        src.random_(0, 255)
        pairs = make_pairs(HOST_BLOCKS, BLOCKS).to(on)
        synchronize(device)
        with torch.cuda.stream(copies):
            if on_gpu:
                torch.cuda._sleep(2_000_000)
            copy_blocks(src, dst, pairs, src_block_dim=0, method=method, signals=signals)
        with torch.cuda.stream(compute):
            for layer in range(LAYERS):
                signals.wait(layer * num_signals // LAYERS)
                seen[layer].copy_(layers[layer])
        synchronize(device)
        assert all(map(signals.is_done, range(num_signals)))
        assert f"({num_signals} of {num_signals} layers done" in repr(signals)
        for a, b in pairs.tolist():
            for layer in range(LAYERS if a >= 0 and b >= 0 else 0):
                assert torch.equal(seen[layer][b].cpu(), src[a, layer])


def test_signals_of_an_empty_copy(device: torch.device) -> None:
    src, dst, *_ = sides(device, "h2d", make_page_first, 64)
    signals = LayerSignals(LAYERS, device=device)
    for pairs in (torch.empty(0, 2, dtype=torch.int64), torch.tensor([[-1, -1]])):
        for on in (CPU, device):
            copy_blocks(src, dst, pairs.to(on), src_block_dim=0, signals=signals)
            synchronize(device)
            assert all(map(signals.is_done, range(LAYERS)))


@pytest.mark.cuda
def test_signals_are_refused_in_a_graph() -> None:
    device = torch.device("cuda")
    src, dst, *_ = sides(device, "h2d", make_page_first, 64)
    pairs = torch.tensor([[1, 1]], device=device)
    signals = LayerSignals(LAYERS, device=device)
    copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="signals: LayerSignals while a graph is captured"):
            copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
        with pytest.raises(RuntimeError, match=r"LayerSignals\.wait: a graph is captured"):
            signals.wait(0)


@pytest.mark.cuda
def test_signals_are_of_one_copy_at_a_time() -> None:
    device = torch.device("cuda")
    src, dst, *_ = sides(device, "h2d", make_page_first, 64)
    pairs = torch.tensor([[1, 1]], device=device)
    signals = LayerSignals(LAYERS, device=device)
    copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
        copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)  # in order
    text = "copy_blocks: signals: of a copy on another stream that has not ended, expected one"
    with pytest.raises(ValueError, match=text):
        copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_freed_signals_keep_their_memory_until_the_copy_has_ended() -> None:
    """Otherwise the copy would set flags in memory that torch has given to others."""
    device = torch.device("cuda")
    src, dst, *_ = sides(device, "h2d", make_page_first, 64)
    pairs = torch.tensor([[1, 1]], device=device)
    signals = LayerSignals(LAYERS, device=device)
    copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)  # loads the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    copy_blocks(src, dst, pairs, src_block_dim=0, signals=signals)
    del signals
    gc.collect()
    others = [torch.zeros(LAYERS, dtype=torch.int32, pin_memory=True) for _ in range(8)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)
