"""Pairs on the CPU whose rows are on a GPU, and rows that move in the order of host memory.

Uploads of pairs without a GPU: tests/launch_child.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

import pytest
import torch
import tvm_ffi
from buffers import INT_DTYPES, Buffer, make_buffer, random_bytes, synchronize
from fake_gpu import OnCuda
from ref import ref_h2d_gather
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jitkern import copy_blocks, d2h_scatter, h2d_gather

METHODS = ["auto", "sm"]


def pairs_of(
    count: int,
    sources: int,
    targets: int,
    dtype: torch.dtype = torch.int64,
    *,
    repeats: bool = True,
    seed: int = 0,
) -> Tensor:
    """Random pairs of distinct destinations, some of them padding; sources may repeat."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.empty(count, 2, dtype=dtype)
    if repeats:
        pairs[:, 0] = torch.randint(0, sources, (count,), generator=generator)
    else:
        pairs[:, 0] = torch.randperm(sources, generator=generator)[:count]
    pairs[:, 1] = torch.randperm(targets, generator=generator)[:count]
    pairs[3::7, 0] = -1
    pairs[5::11, 1] = -(2**31)
    pairs[9::13] = torch.tensor([sources + 5, -1])  # padding counts before the bound
    return pairs


BLOCK_PAIRS = 1 << 20  # int32 pairs of one block of an upload


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_many_blocks_of_pairs(device: torch.device, op: Any, index_dtype: torch.dtype) -> None:
    """Three blocks of short rows, the last one small; a fault in it is found in front of them."""
    count = 2 * BLOCK_PAIRS + 5000
    host = make_buffer((count, 8), pinned=device.type == "cuda")
    gpu = make_buffer((count, 8), device=device, seed=1)
    pairs = pairs_of(count, count, count, index_dtype)
    src, dst = (host, gpu) if op is h2d_gather else (gpu, host)
    expected, old = dst.twin(), dst.twin()
    ref_h2d_gather(src.view, expected.view, pairs)
    bad = pairs.clone()
    bad[count - 2] = torch.tensor([0, count])
    text = f"{op.__name__}: pairs[..., 1]: index {count} at position {count - 2}, expected below "
    for method in METHODS:
        dst.whole.copy_(old.whole)
        with pytest.raises(IndexError, match=re.escape(text)):
            op(src.view, dst.view, bad, method=method)
        synchronize(device)
        assert dst.same(old), method
        op(src.view, dst.view, pairs, method=method)
        synchronize(device)
        assert dst.same(expected), method


def test_more_rows_than_int32_can_count(device: torch.device) -> None:
    """Their numbers travel as int64."""
    num_rows = 2**31 + 9
    # On the CPU only both ends of the 2 GiB are touched.
    host = torch.empty(num_rows, 1, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for row in (0, 1, 2, 9, 2**31 - 1, 2**31, num_rows - 1):
        host[row] = row % 97 + 1
    gpu = make_buffer((50, 1), device=device)
    twin = gpu.twin()
    pairs = torch.tensor([[2**31, 3], [9, 7], [num_rows - 1, 49], [-1, 5], [2**31 - 1, 0]])
    h2d_gather(host, gpu.view, pairs)
    for row, slot in ((2**31, 3), (9, 7), (num_rows - 1, 49), (2**31 - 1, 0)):
        twin.view[slot] = row % 97 + 1
    assert gpu.same(twin)


COUNT, ROW_BYTES = 20_000, 656


def keep_busy() -> None:
    """Have the current stream do nothing for 0.1 s, in which what it is told next has not begun."""
    torch.cuda._sleep(200_000_000)


def host_rows(count: int = COUNT) -> Tensor:
    return random_bytes(count * ROW_BYTES, seed=3).view(count, ROW_BYTES).pin_memory()


def gpu_rows(count: int = COUNT) -> Buffer:
    return make_buffer((count, ROW_BYTES), device="cuda", seed=1)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [60, COUNT, 92_000])
def test_a_gather_is_in_the_order_of_its_stream(method: str, count: int) -> None:
    """After reads of old rows, before reads and writes of new ones; pairs may change at once."""
    src, dst = host_rows(count), gpu_rows(count)
    first_pairs = pairs_of(count, count, count)
    wanted, old = dst.twin(), dst.whole.clone()
    ref_h2d_gather(src, wanted.view, first_pairs)
    before, after = torch.zeros_like(old), torch.zeros_like(old)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        dst.whole.copy_(old)
        pairs = first_pairs.pin_memory()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            keep_busy()
            before.copy_(dst.whole)
            h2d_gather(src, dst.view, pairs, method=method)
            pairs.copy_(pairs.flip(0))
            after.copy_(dst.whole)
            dst.whole.zero_()
        stream.synchronize()
        assert torch.equal(before, old)
        assert torch.equal(after, wanted.whole)
        assert not dst.whole.any()


def kernels_of(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.key for event in seen.key_averages() if event.key.startswith("jitkern")]


@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter, copy_blocks])
def test_pairs_on_another_gpu(op: Any) -> None:
    """Checked before a driver is needed."""
    host, gpu = torch.zeros(3, 1, 8), tvm_ffi.from_dlpack(OnCuda(torch.zeros(3, 1, 8)))
    pairs = tvm_ffi.from_dlpack(OnCuda(torch.zeros(1, 2, dtype=torch.int64), 1))
    text = f"^{op.__name__}: pairs: device cuda:1, expected cuda:0 as in "
    with pytest.raises(ValueError, match=text):
        op(*((gpu, host) if op is d2h_scatter else (host, gpu)), pairs)


@pytest.mark.cuda
@pytest.mark.parametrize("pairs_on", ["cpu", "cuda"])
def test_another_thread_captures(pairs_on: str) -> None:
    """In torch's default mode its allocator may raise in this thread; the call does, or works."""
    src = host_rows(40_000)
    dst = gpu_rows(40_000).view
    pairs = pairs_of(40_000, 40_000, 40_000).to(pairs_on)
    outcomes: list[Any] = []

    def gather() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                h2d_gather(src, dst, pairs)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    thread = threading.Thread(target=gather, daemon=True)
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        thread.start()
        thread.join(60)
    assert outcomes, "the call hangs"
    h2d_gather(src, dst, pairs)
    torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_a_capture_refuses_them_and_goes_on(op: Any) -> None:
    """Also before the pinned memory for pairs is there, or a kernel of this row size."""
    host = make_buffer((50, 41), pinned=True)
    gpu = make_buffer((50, 41), device="cuda", seed=1)
    ends = (host, gpu) if op is h2d_gather else (gpu, host)
    pairs, twins = pairs_of(40, 50, 50), [end.twin() for end in ends]
    counter = torch.zeros(3, device="cuda")
    text = f"^{op.__name__}: pairs: device cpu while a graph is captured, expected device cuda:0: a"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(ValueError, match=text):
            op(*(end.view for end in ends), pairs)
    graph.replay()
    assert counter.tolist() == [1, 1, 1]
    assert all(end.same(twin) for end, twin in zip(ends, twins, strict=True))
    op(*(end.view for end in ends), pairs)  # and afterwards it works
    torch.cuda.synchronize()
    ref_h2d_gather(twins[0].view, twins[1].view, pairs)
    assert ends[1].same(twins[1])


@pytest.mark.cuda
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_auto_sorts_large_calls_on_large_pools(op: Any) -> None:
    """1.5 GiB, of which the calls touch little."""
    rows, few = 3 << 19, 3 << 18
    pool = torch.empty(rows, 1024, dtype=torch.uint8, pin_memory=True)
    cache = torch.zeros(7000, 1024, dtype=torch.uint8, device="cuda")
    pairs = pairs_of(6000, rows, 7000, repeats=False)
    pairs, ends = (pairs, (pool, cache)) if op is h2d_gather else (pairs.flip(1), (cache, pool))
    pairs = pairs.contiguous().cuda()

    def ordered(pairs: Tensor, rows: int, **how: Any) -> bool:
        large = ends[0][:rows] if op is h2d_gather else ends[0]
        to = ends[1] if op is h2d_gather else ends[1][:rows]
        found = kernels_of(lambda: op(large, to, pairs, **how))
        assert len(found) in (1, 4), found
        return "jitkern_scan_regions" in found

    assert ordered(pairs, rows)
    assert not ordered(pairs, rows, order="given")
    assert not ordered(pairs[:4095], rows)
    assert ordered(pairs[:64], rows, order="sorted")
    inside = pairs.clone()
    inside[:, 0 if op is h2d_gather else 1] %= few
    assert not ordered(inside, few)
    assert ordered(inside, few, order="sorted")
