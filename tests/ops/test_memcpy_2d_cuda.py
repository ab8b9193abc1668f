"""memcpy_2d_async on a GPU, in graphs and on streams."""

from __future__ import annotations

import pytest
import torch
from buffers import random_bytes
from test_memcpy_2d import all_sides

from jitkern import memcpy_2d_async
from jitkern.offload import PinnedPool


@pytest.mark.cuda
def test_streams() -> None:
    """Of the current one by default, of the one that is given, of no other device's."""
    pool = torch.randint(0, 256, (64, 1 << 16), dtype=torch.uint8).pin_memory()
    got = torch.zeros(64, 1 << 12, dtype=torch.uint8, device="cuda")
    copy = (1 << 12, 1 << 16, 1 << 12, 64, "h2d")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    memcpy_2d_async(got, pool, *copy, side)
    side.synchronize()
    assert torch.equal(got.cpu(), pool[:, : 1 << 12])
    got.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        memcpy_2d_async(got, pool, *copy)
        twin = got.clone()
    side.synchronize()
    assert torch.equal(twin.cpu(), pool[:, : 1 << 12])
    cpu = torch.zeros(64, 1 << 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="stream: a stream of cuda:0, expected None"):
        memcpy_2d_async(cpu, pool, *copy[:4], "h2h", side)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["h2d", "d2h", "d2d"])
def test_in_a_cuda_graph(kind: str) -> None:
    sides = next(one for one in all_sides(torch.device("cuda")) if one.kind == kind)
    src, dst = sides.memory("src", 40 * 700, 1), sides.memory("dst", 40 * 656, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memcpy_2d_async(dst, src, 656, 700, 656, 40, kind)
        memcpy_2d_async(dst[100:], src, 656, 656, 1, 1, kind)
    for seed in (3, 4):
        src.copy_(random_bytes(len(src), seed))
        graph.replay()
        torch.cuda.synchronize()
        expected = src.view(40, 700)[:, :656].cpu().reshape(-1)
        expected[100] = src[0]
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.multigpu
def test_between_two_gpus() -> None:
    src = random_bytes(40 * 700).to("cuda:0")
    dst = torch.zeros(40 * 656, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    for stream in (None, torch.cuda.Stream(0), torch.cuda.Stream(1)):
        dst.zero_()
        torch.cuda.synchronize(1)
        memcpy_2d_async(dst, src, 656, 700, 656, 40, "d2d", stream)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert torch.equal(dst.cpu().view(40, 656), src.cpu().view(40, 700)[:, :656])
    pinned = random_bytes(64).pin_memory()
    with pytest.raises(ValueError, match="stream: a stream of cuda:0, expected one of cuda:1"):
        memcpy_2d_async(dst, pinned, 8, 8, 8, 8, "h2d", torch.cuda.Stream(0))


@pytest.mark.cuda
def test_a_pool_and_a_pitch_of_more_than_2_gib() -> None:
    with PinnedPool(5 << 30, progress=False) as pool:
        rows = pool.tensor((5 << 30,), torch.uint8)
        pitch = (2 << 30) + 4096
        for row in range(2):
            rows[row * pitch : row * pitch + 100] = row + 1
        got = torch.zeros(2, 100, dtype=torch.uint8, device="cuda")
        memcpy_2d_async(got, rows, 100, pitch, 100, 2, "h2d")
        torch.cuda.synchronize()
        assert got[0].eq(1).all() and got[1].eq(2).all()
