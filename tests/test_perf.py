"""jitkern.perf: what the figures mean, and what a machine without a GPU is told."""

from __future__ import annotations

import logging
import time

import pytest
import torch

import jitkern
from jitkern import perf
from jitkern.arch import Arch
from jitkern.errors import UnsupportedError


def test_timing_gives_median_spread_and_bandwidth() -> None:
    timing = perf.Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median_ms == 3.0
    assert timing.iqr_ms == 2.0  # between 2.0 and 4.0: the outlier does not count
    assert timing.gb_s(6_000_000) == pytest.approx(2.0)
    assert perf.Timing((1.0,)).iqr_ms == 0.0


def test_perf_cpu_measures_milliseconds() -> None:
    ms = perf.perf_cpu(lambda: time.sleep(0.002), repetitions=3)
    assert 1.9 < ms < 50


@pytest.mark.parametrize("timer", [perf.perf_cpu, perf.perf_cuda])
def test_repetitions_below_one_are_refused(timer: object) -> None:
    with pytest.raises(ValueError, match="repetitions: got 0, expected at least 1"):
        timer(lambda: None, repetitions=0)  # type: ignore[operator]


def test_negative_graph_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="cuda_graph_repetitions: got -1"):
        perf.perf_cuda(lambda: None, cuda_graph_repetitions=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_with_the_cure() -> None:
    with pytest.raises(UnsupportedError, match=r"perf_cuda: PyTorch sees no CUDA device.*perf_cpu"):
        jitkern.perf_cuda(lambda: None)
    with pytest.raises(RuntimeError, match="time_replays"):
        perf.time_replays({"one": perf.Replay(lambda: None, 1)}, device="cuda")


def test_footprint_must_be_bytes() -> None:
    with pytest.raises(ValueError, match="memory_footprint: got 0"):
        jitkern.compare_memory_kernel_perf(
            baseline=lambda: None, our_impl=lambda: None, memory_footprint=0
        )


def test_cold_buffers_cover_twice_the_cache() -> None:
    buffers = perf.ColdBuffers(lambda i: i, 10, cache_bytes=100)
    assert len(buffers) == 21
    assert buffers.cold
    assert [buffers[i] for i in (0, 20, 21)] == [0, 20, 0]


def test_cold_buffers_say_when_they_are_too_few() -> None:
    buffers = perf.ColdBuffers(lambda i: i, 1, cache_bytes=100, at_most=8)
    assert len(buffers) == 8
    assert not buffers.cold
    assert len(perf.ColdBuffers(lambda i: i, 1000, cache_bytes=100)) == 2
    with pytest.raises(ValueError, match="bytes_each: got 0"):
        perf.ColdBuffers(lambda i: i, 0, cache_bytes=100)


def test_replays_take_turns_after_one_untimed_round() -> None:
    ran: list[str] = []

    def call(name: str) -> perf.Call:
        return lambda: ran.append(name)

    replays = {"a": perf.cpu_replay([call("a")] * 2), "b": perf.cpu_replay([call("b")])}
    timings = perf.time_replays(replays, device="cpu", rounds=2, before=call("-"))
    assert ran == ["-", "a", "a", "-", "b"] * 3
    assert {name: len(timing.samples_ms) for name, timing in timings.items()} == {"a": 2, "b": 2}


def test_percent_of_ceiling() -> None:
    assert perf.percent_of_ceiling(3.0, 4.0) == 75.0
    with pytest.raises(ValueError, match=r"ceiling_gb_s: got 0\.0"):
        perf.percent_of_ceiling(1.0, 0.0)


@pytest.mark.parametrize("arch", ["8.0", "9.0", "10.0", "12.0"])
def test_copy_kernel_compiles(arch: str) -> None:
    assert perf._copy_module().image(Arch.parse(arch))


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
def test_compare_logs_both_bandwidths(caplog: pytest.LogCaptureFixture) -> None:
    src = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    copy = perf.copy_kernel()
    with caplog.at_level(logging.INFO, "jitkern.perf"):
        theirs, ours = jitkern.compare_memory_kernel_perf(
            baseline=lambda: dst.copy_(src),
            our_impl=lambda: copy(dst, src),
            memory_footprint=2 * src.numel(),
            description="copy: ",
        )
    assert theirs > 10
    assert ours > 10
    assert caplog.messages[0].startswith("copy: Baseline:")


@pytest.mark.cuda
def test_copy_kernel_copies() -> None:
    src = torch.randint(0, 255, (16 * 5001,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    perf.copy_kernel()(dst, src)
    assert torch.equal(dst, src)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        perf.copy_kernel()(dst[:-1], src[:-1])
