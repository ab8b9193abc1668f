"""OverlapMonitor: counts of real runs on the CPU, figures and alarms of given times."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import re
import weakref
from collections.abc import Iterable

import pytest
import torch
from pipelines import bring, host_blocks, pipeline_of, sync, take
from ref import refusals

from jitkern.offload import OverlapMonitor, OverlapStats
from jitkern.offload.monitor import _ROW

SLOT_BYTES = 60

Row = tuple[float, float, float]
"""Milliseconds of compute, transfer and stall of an iteration."""


class FakePipeline:
    slot_bytes = 1 << 20
    num_slots = 3

    def __init__(self, monitor: OverlapMonitor) -> None:
        self.monitor = monitor
        self.rows: list[bytes] = []
        self.end = 0.0
        monitor._attach(self, self.harvest, None)

    def harvest(self, most: int) -> bytes:
        rows, self.rows = self.rows[:most], self.rows[most:]
        return b"".join(rows)

    def add(self, rows: Iterable[Row]) -> None:
        for compute, transfer, stall in rows:
            begin, self.end = self.end + stall, self.end + stall + compute
            self.monitor._num_iterations += 1
            self.monitor._num_copies += 1
            times = (begin - transfer, begin, begin, self.end, math.nan, math.nan)
            self.rows.append(_ROW.pack(*times, 0, self.monitor._num_iterations, 0))
        while self.rows:
            self.monitor._update()


def test_counts_of_every_kind_of_run(device: torch.device) -> None:
    monitor = OverlapMonitor(num_timed_iterations=10, name="weights")
    pipeline = pipeline_of(device, 3, monitor=monitor)
    nothing = monitor.stats()
    assert (nothing.num_iterations, nothing.num_slots, nothing.num_alarms) == (0, 3, 0)
    assert math.isnan(nothing.ratio) and math.isnan(nothing.compute_ms)
    blocks = host_blocks(7, device)
    list(pipeline.load(blocks, copy=bring))
    list(pipeline.store(blocks, copy=take))
    with pipeline:
        list(pipeline.update(blocks, load=bring, store=take))
    sync(device)
    now = monitor.stats()
    assert now.name == "weights"
    assert now.num_iterations == 21
    assert now.moved_bytes == SLOT_BYTES * (7 + 7 + 14)
    for _ in pipeline.load(blocks, copy=bring):
        break
    assert monitor.stats().num_iterations == 22  # a body that ends its run counts
    assert now.compute_ms > 0 and now.transfer_ms > 0
    assert now.ratio == pytest.approx(now.compute_ms / now.transfer_ms)
    with pytest.raises(dataclasses.FrozenInstanceError):
        now.num_slots = 4  # type: ignore[misc]


def test_means_of_a_window() -> None:
    monitor = OverlapMonitor(num_timed_iterations=4)
    fake = FakePipeline(monitor)
    fake.add([(9.0, 9.0, 9.0)] * 5 + [(2.0, 1.0, 0.0), (4.0, 2.0, 1.0), (2.0, 1.0, 1.0)])
    fake.add([(4.0, 4.0, 2.0)])
    now = monitor.stats()
    assert now.num_iterations == 9
    assert (now.compute_ms, now.transfer_ms, now.stall_ms) == (3.0, 2.0, 1.0)
    assert now.ratio == 1.5
    assert now.stall_share == 0.75  # of 0, 1/5, 1/3 and 1/3 of the time
    assert now.gb_per_s == pytest.approx((1 << 20) / 2e6)
    assert now.moved_bytes == 9 << 20


def test_one_alarm_for_a_crossing(caplog: pytest.LogCaptureFixture) -> None:
    alarms: list[OverlapStats] = []
    monitor = OverlapMonitor(num_timed_iterations=4, min_ratio=1.5, on_alarm=alarms.append)
    fake = FakePipeline(monitor)
    with caplog.at_level(logging.WARNING, "jitkern.offload"):
        fake.add([(1.0, 2.0, 1.0)] * 3)
        assert not alarms  # no full window
        fake.add([(1.0, 2.0, 1.0)])
        assert len(alarms) == 1
        fake.add([(1.0, 2.0, 1.0)] * 20)
        fake.add([(1.6, 1.0, 0.0)] * 20)  # above the limit, and not by a tenth
        fake.add([(1.4, 1.0, 0.0)] * 20)
        assert len(alarms) == 1
        fake.add([(1.7, 1.0, 0.0)] * 20)
        fake.add([(1.4, 1.0, 0.0)] * 4)
    assert [alarm.num_alarms for alarm in alarms] == [1, 2]
    assert alarms[0].ratio == 0.5
    assert caplog.messages == [
        "pipeline: compute takes 0.50 times as long as its copies, expected at least 1.50 "
        "(1 ms and 2 ms, 100 % of iterations stalled, 3 slots)",
        "pipeline: compute takes 1.40 times as long as its copies, expected at least 1.50 "
        "(1.4 ms and 1 ms, 0 % of iterations stalled, 3 slots)",
    ]


def test_a_monitor_is_of_one_pipeline() -> None:
    cpu = torch.device("cpu")
    monitor = OverlapMonitor()
    pipeline = pipeline_of(cpu, monitor=monitor)
    list(pipeline.load(host_blocks(3, cpu), copy=bring))
    assert (monitor.stats().num_iterations, monitor.stats().num_slots) == (3, 3)
    pipeline.close()
    assert (monitor.stats().num_iterations, monitor.stats().num_slots) == (3, 0)
    text = "SlotPipeline: monitor: that of another pipeline, expected a new one"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        pipeline_of(cpu, monitor=monitor)


def test_a_pipeline_goes_without_the_collector_of_garbage() -> None:
    cpu = torch.device("cpu")
    pipeline = pipeline_of(cpu, monitor=OverlapMonitor(), max_slots=4)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(pipeline)
        for _ in pipeline.load(range(3), copy=lambda tensor, block: None):
            break
        del pipeline
        assert gone() is None
    finally:
        gc.enable()


test_mistakes = refusals(
    OverlapMonitor,
    {},
    ({"num_timed_iterations": 0}, ValueError, "num_timed_iterations: 0, expected 1 to 2147483647"),
    ({"on_alarm": 3}, TypeError, "on_alarm: int, expected a callable or None"),
    ({"num_timed_iterations": 2.5}, TypeError, "num_timed_iterations: float, "),
    ({"min_ratio": -1}, ValueError, "min_ratio: -1, expected 0 or more"),
    ({"min_ratio": math.nan}, ValueError, "min_ratio: nan, expected 0 or more"),
    ({"min_ratio": "2"}, TypeError, "min_ratio: str, expected a number"),
)
