"""Timing one thing against another on a machine that others use too: many short pairs.

A sample is about a quarter of a millisecond, well under the 3 ms and more for which the scheduler
leaves a process alone, so that most samples are not interrupted. The two take turns, in changing
order, so that frequency, caches and neighbours are the same for both. Of the samples two ratios are
kept: of the fastest ones (what the machine can do) and the median over the pairs (what it does).
A real slowdown moves both; a disturbance seldom does.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitkern.bench.timing import Call, Timing, cuda_replay, cuda_timer, host_ms

if TYPE_CHECKING:
    from jitkern.bench.case import Context, Row

Sample = Callable[[], float]

SAMPLE_US = 250.0
MIN_PAIRS, MAX_PAIRS = 15, 400
QUEUED_LAUNCHES = 200  # a stream takes 1,024 before a launch waits


@dataclass(frozen=True)
class Pairs:
    """Microseconds per call of both, one entry for each pair."""

    ours_us: tuple[float, ...]
    reference_us: tuple[float, ...]

    @property
    def ratio_min(self) -> float:
        return min(self.ours_us) / min(self.reference_us)

    @property
    def ratio_median(self) -> float:
        pairs = zip(self.ours_us, self.reference_us, strict=True)
        return statistics.median(ours / reference for ours, reference in pairs)


def time_pairs(ours: Sample, reference: Sample, *, budget_s: float) -> Pairs:
    """Take samples of both in turn for about that long. A sample returns microseconds per call."""
    times: tuple[list[float], list[float]] = ([], [])
    samples = (ours, reference)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ours(), reference()  # untimed: caches, and memory that was never touched
        end = time.perf_counter() + budget_s
        for pair in range(MAX_PAIRS):
            if pair >= MIN_PAIRS and time.perf_counter() > end:
                break
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                times[which].append(samples[which]())
    finally:
        if was_enabled:
            gc.enable()
    return Pairs(tuple(times[0]), tuple(times[1]))


def host_sampler(ctx: Context, call: Call) -> Sample:
    """Return a sample of the CPU's time per call; where kernels are launched, of the launch."""
    call()
    ctx.sync()
    once_us = min(host_ms(call) for _ in range(3)) * 1e3
    count = max(1, int(SAMPLE_US / max(once_us, 0.05)))
    if ctx.device != "cuda":
        return lambda: host_ms(call, count) * 1e3
    count = min(count, QUEUED_LAUNCHES)

    def on_idle_device() -> float:
        ctx.sync()
        return host_ms(call, count) * 1e3

    return on_idle_device


def device_sampler(calls: list[Call]) -> Sample:
    """Return a sample of the GPU's time per call: a graph of `calls`, between two events."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    replay, timer = cuda_replay(calls), cuda_timer("device_sampler")
    return lambda: timer(replay.run) * 1e3 / replay.calls


def bind(run: Callable[[Any], object], buffers: Any) -> Call:
    """Return the call of `run` on these buffers."""
    return lambda: run(buffers)


def fill_pairs(row: Row, pairs: Pairs) -> None:
    """Write a timing in pairs into its row."""
    row.median_us = statistics.median(pairs.ours_us)
    row.min_us = min(pairs.ours_us)
    row.iqr_us = Timing(pairs.ours_us).iqr_ms
    row.ratio_min, row.ratio_median = pairs.ratio_min, pairs.ratio_median
    if row.bytes_moved:
        row.gb_s = row.bytes_moved / (row.median_us * 1e3)
