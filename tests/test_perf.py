"""jitkern.perf: what the figures mean, and what a machine without a GPU is told."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import pytest
import torch

import jitkern
from jitkern import compare_memory_kernel_perf, perf
from jitkern.errors import UnsupportedError


def test_perf_cpu_measures_milliseconds() -> None:
    ms = perf.perf_cpu(lambda: time.sleep(0.002), repetitions=3)
    assert 1.9 < ms < 50


WRONG: list[tuple[Any, str, int, int]] = [
    (partial(perf.perf_cpu, len), "repetitions", 0, 1),
    (partial(perf.perf_cuda, len), "repetitions", 0, 1),
    (partial(perf.perf_cuda, len), "cuda_graph_repetitions", -1, 0),
    (partial(compare_memory_kernel_perf, baseline=len, our_impl=len), "memory_footprint", 0, 1),
]


@pytest.mark.parametrize(("call", "name", "count", "least"), WRONG)
def test_a_count_that_is_too_low_is_refused(call: Any, name: str, count: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: {count}, expected at least {least}"):
        call(**{name: count})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_with_what_to_use() -> None:
    with pytest.raises(UnsupportedError, match=r"perf_cuda: PyTorch sees no CUDA device.*perf_cpu"):
        jitkern.perf_cuda(lambda: None)


@pytest.mark.cuda
@pytest.mark.parametrize("init_stream", [True, False])
@pytest.mark.parametrize("graph", [None, 0, 4])
def test_perf_cuda_times_a_copy(init_stream: bool, graph: int | None) -> None:
    src = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    ms = perf.perf_cuda(
        lambda: dst.copy_(src), init_stream=init_stream, repetitions=3, cuda_graph_repetitions=graph
    )
    assert 0.005 < ms < 5
    assert torch.equal(dst, src)


@pytest.mark.cuda
@pytest.mark.parametrize("fresh", [False, True])
def test_calls_of_a_graph_write_to_the_same_memory_unless_outputs_are_fresh(fresh: bool) -> None:
    addresses = []

    def call() -> torch.Tensor:
        result = torch.ones(1 << 20, device="cuda")
        addresses.append(result.data_ptr())
        return result

    perf.perf_cuda(call, cuda_graph_repetitions=4, repetitions=1, fresh_outputs=fresh)
    assert len(set(addresses[1:])) == (4 if fresh else 1)


@pytest.mark.cuda
def test_compare_logs_both_bandwidths(caplog: pytest.LogCaptureFixture) -> None:
    src = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    copy = torch.Tensor.copy_
    with caplog.at_level(logging.INFO, "jitkern.perf"):
        theirs, ours = compare_memory_kernel_perf(
            baseline=lambda: dst.copy_(src),
            our_impl=lambda: copy(dst, src),
            memory_footprint=2 * src.numel(),
            description="copy: ",
        )
    assert theirs > 10
    assert ours > 10
    assert caplog.messages[0].startswith("copy: Baseline:")
