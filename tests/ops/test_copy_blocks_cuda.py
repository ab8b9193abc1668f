"""copy_blocks on a GPU, in graphs and on streams."""

from __future__ import annotations

import pytest
import torch
from test_copy_blocks import (
    DIRECTIONS,
    buffers_for,
    pairs_of,
    ref_copy_blocks,
    ways,
)

from jitkern import copy_blocks


@pytest.mark.cuda
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_a_cuda_graph(direction: str) -> None:
    """Pairs and their count are read at each replay; the first call is captured as well."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, direction, (1, 0), 4104 if direction == "h2d" else 4120)
    pairs = pairs_of(device)
    count = torch.tensor([5], device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(src.view, dst.view, pairs, src_block_dim=0, count=count)
    for number, shift in ((5, 0), (13, 1), (0, 2)):
        count.fill_(number)
        pairs.copy_(pairs_of(device).roll(shift, 0))
        twin = dst.twin()
        graph.replay()
        torch.cuda.synchronize()
        ref_copy_blocks(twin.view, src.view, pairs, 1, 0, number)
        assert dst.same(twin)


@pytest.mark.cuda
def test_the_engine_in_a_cuda_graph() -> None:
    """Its copies are of the blocks that the pairs named when it was captured."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, "h2d", (1, 1), 4096)
    pairs = pairs_of(torch.device("cpu"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(src.view, dst.view, pairs, method="engine")
        for method in ("sm", "auto"):
            with pytest.raises(ValueError, match="pairs: device cpu while a graph is captured"):
                copy_blocks(src.view, dst.view, pairs, method=method)
    twin = dst.twin()
    ref_copy_blocks(twin.view, src.view, pairs, 1, 1)
    pairs.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert dst.same(twin)


@pytest.mark.cuda
@pytest.mark.parametrize(("pairs_on", "method"), ways(torch.device("cuda")), ids=str)
def test_the_current_stream(pairs_on: torch.device, method: str) -> None:
    """In order behind what is on it; pairs on the CPU may be changed once the call is back."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, "d2h", (1, 1), 4096)
    pairs = pairs_of(pairs_on)
    new = torch.randint_like(src.whole, 0, 256)
    torch.cuda.synchronize()
    twin = dst.twin()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        src.whole.copy_(new)
        copy_blocks(src.view, dst.view, pairs, method=method)
        if pairs_on.type == "cpu":
            pairs.fill_(0)
        torch.cuda.current_stream().synchronize()
    ref_copy_blocks(twin.view, src.view, pairs_of(pairs_on), 1, 1)
    assert dst.same(twin)
