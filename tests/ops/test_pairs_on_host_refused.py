"""Pairs on the CPU and rows on a GPU: which way they take, and what is refused there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from buffers import Buffer, make_buffer, random_bytes
from ref import ref_h2d_gather
from test_pairs_on_host import GATHERS, each_call, pairs_of
from test_pairs_on_host_cuda import COUNT, ROW_BYTES, gpu_rows, host_rows
from torch.profiler import ProfilerActivity, profile

import jitkern
from jitkern import d2h_scatter, h2d_gather
from jitkern.offload import PinnedPool

pytestmark = pytest.mark.cuda


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
        # With num_sms no part of the SMs is a small call.
        gather = lambda m=method: h2d_gather(src, dst.view, pairs, method=m, num_sms=3)  # noqa: E731
        assert kernels_of(gather) == sizes
        if method != "both":
            call = lambda m=method: d2h_scatter(dst.view, src, pairs, method=m)  # noqa: E731
            assert kernels_of(call) == sizes
    assert kernels_of(lambda: h2d_gather(src, dst.view, on_gpu)) == {"large"}
    pageable = src.clone()
    assert kernels_of(lambda: h2d_gather(pageable, dst.view, pairs)) == {"small"}
    assert kernels_of(lambda: d2h_scatter(dst.view, pageable, pairs)) == {"small"}


@pytest.mark.slow
def test_auto_goes_both_ways_out_of_large_pools() -> None:
    """Of 8 GiB and more, where a call has 16,384 rows or more; of 8,192 or more by the CPU."""
    num_rows, dst = 13_200_000, gpu_rows()
    with PinnedPool([num_rows, ROW_BYTES], torch.uint8) as pool:
        src = pool.tensor()
        pairs = pairs_of(COUNT, num_rows, COUNT)
        rows = pairs[(pairs >= 0).all(dim=1), 0]
        src[rows] = random_bytes(len(rows) * ROW_BYTES, seed=5).view(len(rows), ROW_BYTES)
        expected = dst.twin()
        ref_h2d_gather(src, expected.view, pairs)
        both = kernels_of(lambda: h2d_gather(src, dst.view, pairs, num_sms=3))
        assert both == {"small", "large"}
        assert dst.same(expected)
        for count, sizes in ((16_000, {"small"}), (8_000, {"large"})):
            few = pairs[:count]
            assert kernels_of(lambda few=few: h2d_gather(src, dst.view, few)) == sizes
        part = src[: num_rows // 8]
        inside = torch.stack([pairs[:, 0] % len(part), pairs[:, 1]], dim=1)
        assert kernels_of(lambda: h2d_gather(part, dst.view, inside)) == {"large"}


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
    text = f'd2h_scatter: method: "cpu" {end} "sm"'
    refused(text, lambda: d2h_scatter(dst.view, src, pairs, method="cpu"))
    text = 'd2h_scatter: method: "both", expected "auto", "sm" or "cpu"'
    refused(text, lambda: d2h_scatter(dst.view, src, pairs, method="both"))
    refused(text, lambda: d2h_scatter(dst.view, src, pairs.cpu(), method="both"))


def test_sms_cannot_read_pageable_memory() -> None:
    pairs, dst, host = pairs_of(40, 50, 50), gpu_rows(50), make_buffer((50, ROW_BYTES))
    slot_map = make_buffer((50,), torch.int64, "cuda")
    cure = (
        "pageable host memory, expected pinned host memory for a copy with a GPU; allocate it with "
        "torch.empty(..., pin_memory=True) or call .pin_memory()"
    )
    for how in ({"method": "sm"}, {"method": "both"}, {"reuse_resident": True}):
        refused(
            f"h2d_gather: src: {cure}",
            lambda h=how: h2d_gather(host.view, dst.view, pairs, slot_map=slot_map.view, **h),
            *(dst, slot_map),
        )
    text = f"d2h_scatter: dst: {cure}"
    refused(text, lambda: d2h_scatter(dst.view, host.view, pairs, method="sm"), host)
    for method in ("cpu", "both"):
        text = f'h2d_gather: method: "{method}" with reuse_resident, expected "sm": the slot map is'
        refused(
            f"{text} on the GPU",
            lambda m=method: h2d_gather(
                host.view, dst.view, pairs, slot_map=slot_map.view, reuse_resident=True, method=m
            ),
            *(dst, slot_map),
        )


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
    end = (
        f"src: rows of {LARGEST_ROW + 1} bytes, expected at most {LARGEST_ROW} through the CPU; "
        'pin the host\'s memory, for method="sm"'
    )
    pageable = make_buffer((3, LARGEST_ROW + 1))
    for method in ("auto", "cpu"):
        text = f"h2d_gather: {end}"
        refused(text, lambda m=method: h2d_gather(pageable.view, dst.view, pairs, method=m), dst)
        text = f"d2h_scatter: {end}"
        refused(
            text, lambda m=method: d2h_scatter(dst.view, pageable.view, pairs, method=m), pageable
        )
    text = f"h2d_gather: {end}"
    refused(text, lambda: h2d_gather(host.view, dst.view, pairs, method="both"), dst)


def test_a_pool_that_was_closed() -> None:
    """It is pinned no longer, but its memory lives as long as the tensor: the CPU may read it."""
    pairs, dst = pairs_of(40, 50, 50), gpu_rows(50)
    pool = PinnedPool([50, ROW_BYTES], torch.uint8)
    src = pool.tensor().random_()
    pool.close()
    end = "memory of a PinnedPool that was closed, expected an open pool, or a copy on a GPU"
    for method in ("auto", "sm", "both"):
        text = f"h2d_gather: src: {end}"
        refused(text, lambda m=method: h2d_gather(src, dst.view, pairs, method=m), dst)
    for method in ("auto", "sm"):
        text = f"d2h_scatter: dst: {end}"
        refused(text, lambda m=method: d2h_scatter(dst.view, src, pairs, method=m))
    expected = dst.twin()
    ref_h2d_gather(src, expected.view, pairs)
    h2d_gather(src, dst.view, pairs, method="cpu")
    assert dst.same(expected)


@each_call
@pytest.mark.parametrize("first", [True, False])
def test_a_capture_refuses_them_and_goes_on(op: Any, method: str, first: bool) -> None:
    """Also before the staging memory is there, or a kernel of this row size."""
    host = make_buffer((50, 41 + first), pinned=True)
    gpu = make_buffer((50, 41 + first), device="cuda", seed=1)
    ends = (host, gpu) if op is h2d_gather else (gpu, host)
    pairs = pairs_of(40, 50, 50)
    if not first:
        op(*(end.view for end in ends), pairs, method=method)
    counter = torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    twins = [end.twin() for end in ends]
    text = (
        f"{op.__name__}: pairs: device cpu while a graph is captured, expected device cuda:0: a "
        "replay would not read them again"
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            op(*(end.view for end in ends), pairs, method=method)
        counter.add_(1)
    graph.replay()
    graph.replay()
    assert counter.tolist() == [4, 4, 4]
    assert all(end.same(twin) for end, twin in zip(ends, twins, strict=True))
    op(*(end.view for end in ends), pairs, method=method)  # and afterwards it works
    torch.cuda.synchronize()
    ref_h2d_gather(twins[0].view, twins[1].view, pairs)
    assert ends[1].same(twins[1])
