"""Times and order of a SlotPipeline on fake_driver.c; see ../test_fake_driver.py."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import slot_order
import torch
from fake_gpu import report_checks
from slot_order import CALLERS, CAPTURING, COMPUTES, driver, machine

from jitkern.offload import OverlapMonitor, SlotPipeline
from jitkern.offload.depth import Iteration, total_ms

driver.fake_time.restype = ctypes.c_double
MIB = 1 << 20
Times = Sequence[tuple[float, float, float]]  # ms of load, compute and store


def work(ms: float) -> None:
    driver.fake_work(ctypes.c_void_p(machine.current), ctypes.c_double(ms))


def now(ms: float) -> None:
    driver.fake_now(ctypes.c_double(ms))


def time_of(stream: int) -> float:
    return float(driver.fake_time(ctypes.c_void_p(stream)))


def pipeline_of(depth: int, **how: Any) -> SlotPipeline:
    return SlotPipeline(num_slots=depth, slot_shape=[MIB], dtype=torch.uint8, device="cuda", **how)


def go(pipeline: SlotPipeline, kind: str, times: Times) -> float:
    """Run iterations of the given times; return the ms of the run."""
    if machine.current != COMPUTES:  # as under `with`
        machine.current = CALLERS[0]
    begin = time_of(machine.current)
    blocks = range(len(times))

    def load(_: object, block: int) -> None:
        work(times[block][0])

    def store(_: object, block: int) -> None:
        work(times[block][2])

    copies = {"load": {"copy": load}, "store": {"copy": store}}
    how = copies.get(kind, {"load": load, "store": store})
    for slot in getattr(pipeline, kind)(blocks, **how):
        work(times[slot.block][1])
    return time_of(machine.current) - begin


def check_random_runs_are_in_order_and_no_wait_can_be_left_out() -> None:
    assert not (errors := slot_order.problems(400)), errors[:5]


def iterations(times: Times) -> list[Iteration]:
    return [Iteration(*row, 0.0, True) for row in times]


def check_runs_take_what_the_decision_on_depth_thinks_that_they_take() -> None:
    """As far as streams decide it, without the host and the memory."""
    rng = random.Random(1)
    for kind, depth in itertools.product(("load", "store", "update"), (1, 2, 3, 5, 30)):
        pipeline = pipeline_of(depth)
        for _ in range(5):
            ms = [rng.choices((0.5, 1.0, 2.0, 4.0, 8.0), k=3) for _ in range(20)]
            times = [(a * (kind != "store"), b, c * (kind != "load")) for a, b, c in ms]
            took = go(pipeline, kind, times)
            assert abs(took - total_ms(iterations(times), depth)) < 1e-6, (kind, depth)


def check_copies_that_hide_and_that_do_not() -> None:
    for kind, times, stall_ms in (
        ("load", (2.0, 3.0, 0.0), 0.0),
        ("load", (5.0, 2.0, 0.0), 3.0),
        ("update", (5.0, 2.0, 4.0), 3.0),
    ):
        monitor, (load_ms, compute_ms, _) = OverlapMonitor(num_timed_iterations=19), times
        took = go(pipeline_of(4, monitor=monitor), kind, [times] * 20)
        stats, copies = monitor.stats(), 2 if kind == "update" else 1
        assert (stats.compute_ms, stats.transfer_ms) == (compute_ms, load_ms), stats
        assert (stats.stall_ms, stats.stall_share) == (stall_ms, stall_ms / 3), stats
        assert stats.ratio == compute_ms / load_ms, stats
        assert stats.moved_bytes == 20 * copies * MIB, stats
        assert abs(stats.gb_per_s - copies * MIB / 1e6 / load_ms) < 1e-9, stats
        assert stall_ms or took == 2 + 20 * 3


def check_a_late_host_is_no_stall() -> None:
    monitor = OverlapMonitor(num_timed_iterations=9)
    pipeline = pipeline_of(2, monitor=monitor)
    machine.current = CALLERS[0]
    for _ in pipeline.load(range(10), copy=lambda *_: work(1.0)):
        work(2.0)
        # The compute stream is idle for a while after the body.
        pipeline._streams.next(-1, 0)
        work(7.0)
    stats = monitor.stats()
    assert (stats.compute_ms, stats.stall_ms) == (2.0, 0.0), stats


def check_sessions_do_not_wait_for_each_other() -> None:
    """The time between them is no stall; under `with`, the next run's first body may stall."""
    monitor = OverlapMonitor()
    pipeline = pipeline_of(2, monitor=monitor)
    for _ in range(3):
        go(pipeline, "load", [(4.0, 5.0, 0.0)] * 4)
        machine.current = CALLERS[0]
        work(100.0)
    stats = monitor.stats()
    assert stats.num_iterations == 12 and stats.stall_share == 0.0, stats
    chained = OverlapMonitor()
    pipeline = pipeline_of(2, monitor=chained)
    with pipeline:
        for _ in range(3):
            for _ in pipeline.load(range(4), copy=lambda tensor, block: work(6.0)):
                work(5.0)
    assert chained.stats().stall_share == 11 / 12, chained.stats()


def check_captures_are_not_timed() -> None:
    monitor = OverlapMonitor()
    pipeline = pipeline_of(3, monitor=monitor)
    go(pipeline, "update", [(2.0, 3.0, 1.0)] * 10)
    driver.fake_capture_of(ctypes.c_void_p(CAPTURING), 1)
    machine.current = CAPTURING
    for _ in pipeline.load(range(7), copy=lambda tensor, block: work(1.0)):
        work(1.0)
    assert machine.current == CAPTURING
    driver.fake_capture_of(ctypes.c_void_p(CAPTURING), 0)
    go(pipeline, "update", [(2.0, 3.0, 1.0)] * 10)
    stats = monitor.stats()
    assert (stats.num_iterations, stats.compute_ms) == (20, 3.0), stats


def check_events_are_given_back() -> None:
    before = driver.fake_events()
    for is_watched in (False, True):
        pipeline = pipeline_of(3, monitor=OverlapMonitor() if is_watched else None)
        go(pipeline, "update", [(2.0, 3.0, 1.0)] * 10)
        assert driver.fake_events() > before
        pipeline.close()
        del pipeline
        assert driver.fake_events() == before


def bursts(count: int) -> Times:
    """Every eighth load takes as long as ten others; more slots can hide it."""
    return [(10.0 if i % 8 == 5 else 1.0, 3.0, 0.0) for i in range(count)]


def check_slots_are_taken_and_given_back_in_a_run() -> None:
    pipeline = pipeline_of(2, max_slots=8)
    took = go(pipeline, "load", bursts(220))
    depth = pipeline.num_slots
    assert 3 <= depth <= 8, depth
    assert len(pipeline._free) == depth
    best = total_ms(iterations(bursts(220)), 8)
    worst = total_ms(iterations(bursts(220)), 2)
    assert took < best + 0.1 * (worst - best) + 10, (took, best, worst)
    go(pipeline, "load", [(1.0, 3.0, 0.0)] * 400)
    assert pipeline.num_slots == 2, pipeline.num_slots
    go(pipeline, "load", bursts(100))
    depth = pipeline.num_slots
    assert depth > 2
    assert sorted(slot.index for slot in pipeline._free) == list(range(depth))


def check_no_memory_for_more() -> None:
    pipeline = pipeline_of(2, max_slots=8)
    add: Callable[..., Any] = pipeline._streams.add_slot

    def add_slot(index: int, *args: Any) -> Any:
        if index == 3:
            raise torch.OutOfMemoryError("no more")
        return add(index, *args)

    pipeline._streams.add_slot = add_slot  # type: ignore[method-assign]
    go(pipeline, "load", bursts(200))
    assert pipeline.num_slots == 3


if __name__ == "__main__":
    slot_order.set_up()
    driver.fake_now(ctypes.c_double(1e30))
    report_checks(globals(), lambda: now(1e30))
