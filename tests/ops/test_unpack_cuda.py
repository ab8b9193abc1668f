"""unpack on a GPU, in graphs and on streams."""

from __future__ import annotations

import re

import pytest
import torch
from test_unpack import DIRECTIONS, LEAST, MOST, buffers, places, ref_unpack, rows_of, scattered

import jitkern
from jitkern import unpack


@pytest.mark.cuda
@pytest.mark.parametrize("width", [3, 6])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_a_cuda_graph(direction: str, width: int) -> None:
    """Descriptors and their count are read at each replay; the first call is captured as well."""
    device = torch.device("cuda")
    dst, src = buffers(device, 90_000, 200_000, direction=direction)
    sizes = [7, 300, 4096, 60_000, 1, 16]
    rows = rows_of(scattered(sizes, 90_000, 200_000), device, width)
    count = torch.tensor([6], device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unpack(src.view, dst.view, rows, count=count)
    for number, seed in ((6, 1), (2, 2), (0, 3), (6, 4)):
        count.fill_(number)
        rows.copy_(rows_of(scattered(sizes, 90_000, 200_000, seed), device, width))
        twin = dst.twin()
        graph.replay()
        torch.cuda.synchronize()
        ref_unpack(src.view, twin.view, rows, number)
        assert dst.same(twin)
    rows[1, 1] = MOST
    twin = dst.twin()
    count.fill_(6)
    graph.replay()
    torch.cuda.synchronize()
    text = f"unpack: dst: bytes up to {MOST} in descriptor 1, expected at most 200000"
    with pytest.raises(IndexError, match=re.escape(text)):
        jitkern.check()
    ref_unpack(src.view, twin.view, rows[[0, 2, 3, 4, 5]])
    assert dst.same(twin)


@pytest.mark.cuda
@pytest.mark.parametrize("which", [0, 1])
def test_order_on_a_stream(which: int) -> None:
    """Behind what was queued, also where that writes the descriptors; a call after a call."""
    device = torch.device("cuda")
    where = places(device)[which]
    dst, src = buffers(device, 90_000, 200_000)
    rows = rows_of(scattered([5000] * 20, 90_000, 200_000), where)
    wanted = rows.clone()
    new = torch.randint_like(src.whole, 0, 256)
    if where.type == "cuda":
        rows.fill_(LEAST)
    torch.cuda.synchronize()
    twin = dst.twin()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        src.whole.copy_(new)
        if where.type == "cuda":
            rows.copy_(wanted)
        unpack(src.view, dst.view, rows)
        if where.type == "cpu":
            rows.fill_(0)
        torch.cuda.current_stream().synchronize()
    jitkern.check()
    reference = src.twin()
    reference.whole.copy_(new)
    ref_unpack(reference.view, twin.view, wanted)
    assert dst.same(twin)


@pytest.mark.cuda
def test_calls_that_depend_on_each_other() -> None:
    """Programmatic dependent launches: a kernel's writes are seen by the next one's first read."""
    device = torch.device("cuda")
    size, calls = 1 << 16, 40
    memory = torch.randint(0, 256, (calls + 1, size), dtype=torch.uint8, device=device)
    first = memory[0].clone()
    rows = torch.tensor([[0, size, size]], device=device).expand(calls, 3).clone()
    rows[:, 0] = 3  # off by three, so that every call moves what it brings
    rows[:, 1] = 0
    rows[:, 2] = size - 3
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(calls):
            unpack(memory[i], memory[i + 1], rows[i : i + 1])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(memory[calls, : size - 3 * calls], first[3 * calls :])
