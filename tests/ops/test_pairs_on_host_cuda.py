"""Pairs on the CPU and rows on a GPU: what waits for what, and what is refused there.

More of it, on a GPU made of threads, is in tests/threads/staging.cc.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from buffers import Buffer, make_buffer, random_bytes
from ref import ref_h2d_gather
from test_pairs_on_host import GATHERS, NUM_CORES, pairs_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import jitkern
from jitkern import d2h_scatter, h2d_gather

pytestmark = pytest.mark.cuda

COUNT, ROW_BYTES = 20_000, 656  # 13 MB, which the chunks hold, so that a call need not wait


def keep_busy(cycles: int = 200_000_000) -> None:
    """Have the current stream do nothing for 0.1 s, in which what it is told next has not begun."""
    torch.cuda._sleep(cycles)


def host_rows(method: str = "sm", count: int = COUNT, row_bytes: int = ROW_BYTES) -> Tensor:
    rows = random_bytes(count * row_bytes, seed=3).view(count, row_bytes)
    return rows if method in ("auto", "cpu") else rows.pin_memory()


def gpu_rows(count: int = COUNT, seed: int = 1) -> Buffer:
    return make_buffer((count, ROW_BYTES), device="cuda", seed=seed)


def gathered(src: Tensor, dst: Buffer, pairs: Tensor) -> Buffer:
    """What `dst` will be, made before anything is queued; all that the call needs is compiled."""
    expected = dst.twin()
    ref_h2d_gather(src, expected.view, pairs)
    spare = gpu_rows()
    for method in GATHERS if src.is_pinned() else ["cpu"]:
        h2d_gather(src, spare.view, pairs, method=method)
    torch.cuda.synchronize()
    return expected


# -- when pairs and rows are read ------------------------------------------------------------------


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


# -- which way -------------------------------------------------------------------------------------


def kernels_of(call: Any) -> set[str]:
    """Sizes of the calls that SMs were given: what is put into place out of chunks is small."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in seen.key_averages() if event.key.startswith("jitkern_")]
    return {name.rpartition("_")[2] for name in names if "2h_" in name or "2d_" in name}


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
        assert kernels_of(gather) == sizes
    assert kernels_of(lambda: h2d_gather(src, dst.view, on_gpu)) == {"large"}
    pageable = src.clone()
    assert kernels_of(lambda: h2d_gather(pageable, dst.view, pairs)) == {"small"}


# -- what is refused -------------------------------------------------------------------------------


def refused(text: str, call: Any, *written: Buffer) -> None:
    """ValueError of exactly this text, with nothing written now or later."""
    twins = [buffer.twin() for buffer in written]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()
    torch.cuda.synchronize()
    jitkern.check()
    assert all(buffer.same(twin) for buffer, twin in zip(written, twins, strict=True))


def test_the_cpu_cannot_read_pairs_on_a_gpu() -> None:
    src, dst, pairs = host_rows("sm", 50), gpu_rows(50), pairs_of(40, 50, 50).cuda()
    end = "with pairs on cuda:0, expected pairs on the CPU, whose cores read them, or"
    for method in ("cpu", "both"):
        text = f'h2d_gather: method: "{method}" {end} "sm"'
        refused(text, lambda m=method: h2d_gather(src, dst.view, pairs, method=m), dst)


LARGEST_ROW = (4 << 20) - 128 - 3 * 4  # of a chunk of its own, with its pair and its slot


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
