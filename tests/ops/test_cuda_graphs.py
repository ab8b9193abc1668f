"""Graphs, streams, several GPUs, and faults that kernels report: what only a GPU can show."""

from __future__ import annotations

import pytest
import torch
from buffers import random_bytes
from ref import ref_indexing, ref_store
from torch import Tensor

import jitkern
from jitkern import d2h_scatter, h2d_gather, indexing, store_cache

pytestmark = pytest.mark.cuda

SLOTS, ROWS, ROW_BYTES = 500, 64, 656


def device_bytes(rows: int, seed: int = 0, device: str = "cuda") -> Tensor:
    return random_bytes(rows * ROW_BYTES, seed).view(rows, ROW_BYTES).to(device)


def pinned_bytes(rows: int, seed: int = 0) -> Tensor:
    return random_bytes(rows * ROW_BYTES, seed).view(rows, ROW_BYTES).pin_memory()


def test_a_large_gather_in_a_graph() -> None:
    """Its scratch memory is of the graph's pool; each replay has other repeats."""
    count, num_src = 40_000, 5_000
    src = pinned_bytes(num_src)
    source = src.cuda()
    dst = torch.zeros(count + num_src, ROW_BYTES, dtype=torch.uint8, device="cuda")
    pairs = torch.full((count, 2), -1, dtype=torch.int32, device="cuda")
    slot_map = torch.full((num_src,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h2d_gather(src, dst, pairs, slot_map=slot_map)
    for distinct_rows in (1, 50, num_src):
        dst.zero_()
        slot_map.fill_(-1)
        pairs[:, 0].random_(0, distinct_rows)
        pairs[:, 1] = torch.randperm(count, device="cuda")
        graph.replay()
        expected = source[pairs[:, 0].long()]
        assert torch.equal(dst[pairs[:, 1].long()], expected)
        asked = pairs[:, 0].unique().long()
        assert torch.equal(dst[slot_map[asked].long()], source[asked])
        assert int(slot_map[asked].max()) < count
    jitkern.check()


@pytest.mark.parametrize("rows", [SLOTS, 40_000], ids=["small", "large"])
def test_a_gather_and_a_scatter_on_two_streams(rows: int) -> None:
    """Both ways over the bus at once, 50 times; large gathers each with scratch memory."""
    incoming, outgoing = pinned_bytes(rows), device_bytes(rows, 1)
    arrived = torch.zeros_like(outgoing)
    written = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    numbers = torch.arange(rows, device="cuda")
    there = torch.stack([numbers // 2, torch.randperm(rows, device="cuda")], dim=1)  # repeats
    back = torch.stack([numbers, numbers.flip(0)], dim=1)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(first):
            h2d_gather(incoming, arrived, there)
        with torch.cuda.stream(second):
            d2h_scatter(outgoing, written, back)
    torch.cuda.synchronize()
    assert torch.equal(arrived[there[:, 1]].cpu(), incoming[there[:, 0].cpu()])
    assert torch.equal(written, outgoing.cpu().flip(0))


@pytest.mark.multigpu
def test_each_gpu_by_its_tensors() -> None:
    """The current device does not matter and is left as it was."""
    last = torch.cuda.device_count() - 1
    for ordinal in range(last, -1, -1):
        device = f"cuda:{ordinal}"
        caches = [device_bytes(SLOTS, s, device) for s in (1, 2)]
        rows = [device_bytes(ROWS, s, device) for s in (3, 4)]
        expected = [cache.clone() for cache in caches]
        slots = torch.randperm(SLOTS, device=device)[:ROWS]
        with torch.cuda.device(0 if ordinal else last):
            current = torch.cuda.current_device()
            store_cache(*caches, slots, *rows)
            found = indexing(caches[0], slots)
            assert torch.cuda.current_device() == current
        torch.cuda.synchronize(ordinal)
        ref_store(*expected, slots, *rows)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
        assert torch.equal(found, ref_indexing(caches[0], slots))


@pytest.mark.multigpu
def test_a_fault_belongs_to_its_gpu() -> None:
    table = device_bytes(SLOTS, device="cuda:1")
    indexing(table, torch.tensor([SLOTS], device="cuda:1"))
    torch.cuda.synchronize(1)
    jitkern.check(0)
    indexing(table.to("cuda:0"), torch.tensor([0], device="cuda:0"))
    with pytest.raises(IndexError, match=r"index 500 at position 0.*cuda:1"):
        jitkern.check("cuda:1")
    jitkern.check(1)
