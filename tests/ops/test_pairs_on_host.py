"""Pairs on the CPU whose rows are on a GPU, and rows that move in the order of host memory.

On CPU tensors a way is checked and changes nothing. More of it, on a GPU made of threads, is in
tests/threads/staging.cc.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES, Buffer, make_buffer, random_bytes, synchronize
from ref import ref_h2d_gather
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import jitkern
from jitkern import d2h_scatter, h2d_gather

NUM_CORES = len(os.sched_getaffinity(0))
GATHERS = ["auto", "sm", "cpu", "both"]


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


CHUNK_BYTES = 4 << 20  # of which six are on their way
BLOCK_PAIRS = 512 << 10  # that are copied at a time


def test_many_chunks(device: torch.device) -> None:
    """60 MB through six chunks of 4, whatever the way and the number of threads."""
    count = 92_000
    src = make_buffer((count + 11, 656), gap=16, pinned=device.type == "cuda")
    dst = make_buffer((count + 11, 656), device=device, seed=1, gap=16)
    assert count * 656 > 2 * 6 * CHUNK_BYTES
    pairs = pairs_of(count, count + 11, count + 11)
    expected, old = dst.twin(), dst.whole.clone()
    ref_h2d_gather(src.view, expected.view, pairs)
    for method in GATHERS:
        for num_threads in (None, 1, min(2, NUM_CORES), NUM_CORES):
            dst.whole.copy_(old)
            h2d_gather(src.view, dst.view, pairs, method=method, num_threads=num_threads)
            synchronize(device)
            assert dst.same(expected), (method, num_threads)


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
    for method in GATHERS if op is h2d_gather else ["auto"]:
        dst.whole.copy_(old.whole)
        with pytest.raises(IndexError, match=re.escape(text)):
            op(src.view, dst.view, bad, method=method)
        synchronize(device)
        assert dst.same(old), method
        op(src.view, dst.view, pairs, method=method)
        synchronize(device)
        assert dst.same(expected), method


@pytest.mark.parametrize("method", ["auto", "cpu"])
def test_more_rows_than_int32_can_count(device: torch.device, method: str) -> None:
    """Their numbers travel as int64."""
    num_rows = 2**31 + 9
    host = torch.empty(num_rows, 1, dtype=torch.uint8)  # touched at both ends, of 2 GiB
    for row in (0, 1, 2, 9, 2**31 - 1, 2**31, num_rows - 1):
        host[row] = row % 97 + 1
    gpu = make_buffer((50, 1), device=device)
    twin = gpu.twin()
    pairs = torch.tensor([[2**31, 3], [9, 7], [num_rows - 1, 49], [-1, 5], [2**31 - 1, 0]])
    h2d_gather(host, gpu.view, pairs, method=method)
    for row, slot in ((2**31, 3), (9, 7), (num_rows - 1, 49), (2**31 - 1, 0)):
        twin.view[slot] = row % 97 + 1
    assert gpu.same(twin)


COUNT, ROW_BYTES = 20_000, 656  # 13 MB, which the chunks hold, so that a call need not wait


def keep_busy() -> None:
    """Have the current stream do nothing for 0.1 s, in which what it is told next has not begun."""
    torch.cuda._sleep(200_000_000)


def host_rows(method: str = "sm", count: int = COUNT) -> Tensor:
    rows = random_bytes(count * ROW_BYTES, seed=3).view(count, ROW_BYTES)
    return rows if method in ("auto", "cpu") else rows.pin_memory()


def gpu_rows(count: int = COUNT) -> Buffer:
    return make_buffer((count, ROW_BYTES), device="cuda", seed=1)


def gathered(src: Tensor, dst: Buffer, pairs: Tensor) -> Buffer:
    """What `dst` will be, made before anything is queued; all that the call needs is compiled."""
    expected = dst.twin()
    ref_h2d_gather(src, expected.view, pairs)
    spare = gpu_rows()
    for method in GATHERS if src.is_pinned() else ["cpu"]:
        h2d_gather(src, spare.view, pairs, method=method)
    torch.cuda.synchronize()
    return expected


@pytest.mark.cuda
@pytest.mark.parametrize("method", GATHERS)
@pytest.mark.parametrize("pinned", [False, True])
def test_pairs_of_a_gather_may_change_right_after_the_call(method: str, pinned: bool) -> None:
    src, dst, pairs = host_rows(method), gpu_rows(), pairs_of(COUNT, COUNT, COUNT)
    expected = gathered(src, dst, pairs)
    pairs = pairs.pin_memory() if pinned else pairs
    keep_busy()
    h2d_gather(src, dst.view, pairs, method=method)
    pairs.copy_(pairs.flip(0))
    assert dst.same(expected)


@pytest.mark.cuda
@pytest.mark.parametrize("method", GATHERS)
@pytest.mark.parametrize("count", [60, COUNT, 92_000])
def test_a_gather_is_in_the_order_of_its_stream(method: str, count: int) -> None:
    """Behind what reads the old rows, in front of what reads and overwrites the new; 60 MB wait."""
    src, dst = host_rows(method, count), gpu_rows(count)
    pairs = pairs_of(count, count, count)
    wanted, old = dst.twin(), dst.whole.clone()
    ref_h2d_gather(src, wanted.view, pairs)
    before, after = torch.zeros_like(old), torch.zeros_like(old)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        dst.whole.copy_(old)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            keep_busy()
            before.copy_(dst.whole)
            h2d_gather(src, dst.view, pairs, method=method)
            after.copy_(dst.whole)
            dst.whole.zero_()
        stream.synchronize()
        assert torch.equal(before, old)
        assert torch.equal(after, wanted.whole)
        assert not dst.whole.any()


@pytest.mark.cuda
@pytest.mark.skipif(NUM_CORES < 2, reason="two threads of the CPU in a call")
def test_threads_of_every_way() -> None:
    """None waits for another that waits for it, and each finds its own rows."""

    def calls(seed: int) -> None:
        host = host_rows("cpu")
        pinned = host.pin_memory()
        with torch.cuda.stream(torch.cuda.Stream()):
            rows = torch.zeros_like(host, device="cuda")
            for i in range(40):
                method = ("sm", "cpu", "both")[(i + seed) % 3]
                count = (COUNT, 1, 300, 5000)[(i + seed) % 4]
                pairs = pairs_of(count, COUNT, COUNT, seed=40 * seed + i)
                expected = rows.cpu()
                ref_h2d_gather(host, expected, pairs)
                source = host if method == "cpu" else pinned
                h2d_gather(source, rows, pairs, method=method, num_threads=1 + i % 2)
                assert torch.equal(rows.cpu(), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(4)))


def kernels_of(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.key for event in seen.key_averages() if event.key.startswith("jitkern")]


def sizes_of(call: Any) -> set[str]:
    """Sizes of the calls that SMs were given: what is put into place out of chunks is small."""
    names = [name for name in kernels_of(call) if "2h_" in name or "2d_" in name]
    return {name.rpartition("_")[2] for name in names}


@pytest.mark.cuda
def test_the_way_that_was_asked_for_is_taken() -> None:
    src, dst = host_rows("sm"), gpu_rows()
    pairs, on_gpu = pairs_of(COUNT, COUNT, COUNT), pairs_of(COUNT, COUNT, COUNT).cuda()
    ways = {"sm": {"large"}, "cpu": {"small"}, "both": {"small", "large"}, "auto": {"large"}}
    for method, sizes in ways.items():
        # With num_sms no part of the SMs is a small call; 31 threads would take all rows at once.
        threads = 8 if method in ("cpu", "both") else None
        gather = lambda m=method, n=threads: h2d_gather(  # noqa: E731
            src, dst.view, pairs, method=m, num_sms=3, num_threads=n
        )
        assert sizes_of(gather) == sizes
    assert sizes_of(lambda: h2d_gather(src, dst.view, on_gpu)) == {"large"}
    pageable = src.clone()
    assert sizes_of(lambda: h2d_gather(pageable, dst.view, pairs)) == {"small"}


def refused(text: str, call: Any, *written: Buffer) -> None:
    """ValueError of exactly this text, with nothing written now or later."""
    twins = [buffer.twin() for buffer in written]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()
    torch.cuda.synchronize()
    jitkern.check()
    assert all(buffer.same(twin) for buffer, twin in zip(written, twins, strict=True))


@pytest.mark.cuda
def test_the_cpu_cannot_read_pairs_on_a_gpu() -> None:
    src, dst, pairs = host_rows("sm", 50), gpu_rows(50), pairs_of(40, 50, 50).cuda()
    end = "with pairs on cuda:0, expected pairs on the CPU, whose cores read them, or"
    for method in ("cpu", "both"):
        text = f'h2d_gather: method: "{method}" {end} "sm"'
        refused(text, lambda m=method: h2d_gather(src, dst.view, pairs, method=m), dst)


LARGEST_ROW = (4 << 20) - 128 - 3 * 4  # of a chunk of its own, with its pair and its slot


@pytest.mark.cuda
def test_rows_larger_than_a_chunk() -> None:
    pairs = torch.tensor([[0, 1], [2, 0]])
    for extra, methods in ((0, GATHERS), (1, ["sm"])):
        host = make_buffer((3, LARGEST_ROW + extra), pinned=True)
        dst = make_buffer((3, LARGEST_ROW + extra), device="cuda", seed=1)
        expected = dst.twin()
        ref_h2d_gather(host.view, expected.view, pairs)
        for method in methods:
            dst.view[:2].zero_()
            h2d_gather(host.view, dst.view, pairs, method=method)
            assert dst.same(expected), method
    text = (
        f"h2d_gather: src: rows of {LARGEST_ROW + 1} bytes, expected at most {LARGEST_ROW} through "
        'the CPU; pin the host\'s memory, for method="sm"'
    )
    pageable = make_buffer((3, LARGEST_ROW + 1))
    for method in ("auto", "cpu"):
        refused(text, lambda m=method: h2d_gather(pageable.view, dst.view, pairs, method=m), dst)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("op", "method"), [*((h2d_gather, method) for method in GATHERS), (d2h_scatter, "auto")]
)
def test_a_capture_refuses_them_and_goes_on(op: Any, method: str) -> None:
    """Also before the staging memory is there, or a kernel of this row size."""
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
            op(*(end.view for end in ends), pairs, method=method)
    graph.replay()
    assert counter.tolist() == [1, 1, 1]
    assert all(end.same(twin) for end, twin in zip(ends, twins, strict=True))
    op(*(end.view for end in ends), pairs, method=method)  # and afterwards it works
    torch.cuda.synchronize()
    ref_h2d_gather(twins[0].view, twins[1].view, pairs)
    assert ends[1].same(twins[1])


@pytest.mark.cuda
@pytest.mark.parametrize("row_bytes", [8, 656])
def test_many_pairs_of_every_region(row_bytes: int) -> None:
    """300,000 of 600,000 rows that are 2 KiB apart, in regions of 512 KiB."""
    count, num_src, device = 300_000, 600_000, torch.device("cuda")
    memory = torch.empty(num_src * 2048, dtype=torch.uint8, pin_memory=True)
    src = memory.view(num_src, 2048)[:, 64 : 64 + row_bytes]
    src.random_()
    dst = make_buffer((count, row_bytes), device=device, seed=1)
    twin = dst.twin()
    pairs = pairs_of(count, num_src, count, torch.int32, repeats=False).to(device)
    h2d_gather(src, dst.view, pairs)
    ref_h2d_gather(src, twin.view, pairs)
    assert dst.same(twin)
    src.zero_()
    back = pairs.flip(1).contiguous()
    d2h_scatter(dst.view, src, back)
    wanted = torch.zeros_like(src)
    ref_h2d_gather(dst.view, wanted, back)
    torch.cuda.synchronize()
    assert torch.equal(src, wanted)


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
    assert ordered(pairs[:64], rows, order="host")
    inside = pairs.clone()
    inside[:, 0 if op is h2d_gather else 1] %= few
    assert not ordered(inside, few)
    assert ordered(inside, few, order="host")
