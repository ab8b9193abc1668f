"""Graphs, streams, several GPUs, and faults that kernels report: what only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi
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


def test_the_next_call_raises_an_earlier_fault_and_does_nothing() -> None:
    cache, rows = device_bytes(SLOTS), device_bytes(4, 1)
    before = cache.clone()
    store_cache(cache, before.clone(), torch.full((4,), SLOTS + 3, device="cuda"), rows, rows)
    torch.cuda.synchronize()
    slots = torch.arange(4, device="cuda")
    with pytest.raises(IndexError, match="store_cache: indices: index 503 at position"):
        indexing(cache, slots)
    with_other = before.clone()
    store_cache(cache, with_other, slots, rows, rows)  # told once, forgotten
    torch.cuda.synchronize()
    assert torch.equal(cache[:4], rows)
    assert torch.equal(cache[4:], before[4:])


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


class Foreign:
    """A tensor that says no more than DLPack does, and orders no streams."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return torch.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("kind", [lambda one: one, tvm_ffi.from_dlpack], ids=["dlpack", "ffi"])
def test_without_a_tensor_of_torch_its_current_stream_is_taken(kind: Callable[[Any], Any]) -> None:
    """Other calls and modes, without a GPU: tests/fault_child.py."""
    rows, cache = torch.zeros(5, 8, device="cuda"), torch.zeros(5, 8, device="cuda")
    indices = torch.arange(5, device="cuda")
    to, where, new = (kind(Foreign(one)) for one in (cache, indices, rows))
    store_cache(to, None, where, new)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles, of some 2 GHz
        rows.fill_(3)
        store_cache(to, None, where, new)
        found = cache.clone()
    stream.synchronize()
    assert torch.equal(found, torch.full_like(found, 3))


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
