"""Which iterations of a SlotPipeline are timed, on the clocks of fake_driver.c.

Run by test_slot_times.py. A body says by its time which iteration it is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any

import slot_order
from fake_gpu import report_checks
from slot_order import CALLERS, driver
from slot_times_child import MIB, go, now, pipeline_of, random_times, time_of

from jitkern.offload import AutoDepth, OverlapMonitor, SlotPipeline
from jitkern.offload.monitor import _COMPUTE, _NUM_COLUMNS

Row = tuple[float | None, ...]
KINDS = ("load", "store", "update")
PARTS = 4096  # of a ms: those of a body are its number
CAPACITY = 2000


def rows_of(monitor: OverlapMonitor) -> dict[int, Row]:
    """Return what is known of each iteration, by its number."""
    monitor.snapshot()
    columns = [monitor._last(column, CAPACITY) for column in range(_NUM_COLUMNS)]
    by_number = {}
    for row in zip(*columns, strict=True):
        number = round(row[_COMPUTE] * PARTS) % PARTS
        by_number[number] = tuple(None if ms != ms else ms for ms in row)
    return by_number


def bursts_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return those that follow each other, together."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if not found or number != found[-1][-1] + 1:
            found.append([])
        found[-1].append(number)
    return found


def check_what_is_timed_of_a_long_run() -> None:
    """All at first, then bursts that come to one in so many; what is not known is no row."""
    count = 1500
    for kind, depth, every in product(KINDS, (1, 3, 12), (2, 4, 5)):
        ends = [driver.fake_records(is_timed) for is_timed in (0, 1)]
        monitor = OverlapMonitor(every=every, capacity=CAPACITY)
        pipeline = pipeline_of(depth, monitor=monitor)
        load_ms, store_ms = float(kind != "store"), float(kind != "load")
        go(pipeline, kind, [(load_ms, 1 + i / PARTS, store_ms) for i in range(count)])
        found = monitor.snapshot()
        case = (kind, depth, every, found)
        assert (found.iterations, found.dropped) == (count, 0), case
        assert found.bytes_moved == count * (load_ms + store_ms) * MIB, case

        first, *others = bursts_of(rows_of(monitor))
        assert first[:32] == list(range(32)), case
        # A body of a run of stores waits for the store before it in its slot.
        known = 8 if kind == "store" else 8 + depth - 1
        for burst in others[:-1]:
            assert len(burst) == known or len(burst) > 2 * known, (case, burst)
        places = {burst[0] % 64 for burst in others}
        assert len(places) > min(16, len(others) / 2), (case, others)

        plain, timed = (driver.fake_records(i) - ends[i] for i in (0, 1))
        accesses = 3 if kind == "update" else 2
        num_timed = timed / (2 * accesses)
        assert abs(num_timed - 32 - (count - 32) / every) <= 8 + depth, (case, num_timed)
        # An access that is not timed has its end recorded alone, as without a monitor; besides
        # there are the slots, what comes before the run and what comes behind.
        besides = plain - accesses * (count - num_timed)
        assert depth <= besides <= depth + 4, (case, besides)


def go_numbered(pipeline: SlotPipeline, kind: str, seed: int, count: int) -> None:
    """Go through short and long runs, alone and under `with`, of which some end early."""
    rng = random.Random(seed)
    done = 0
    while done < count:
        with pipeline if rng.random() < 0.5 else nullcontext():
            for _ in range(rng.randrange(1, 4)):
                stop = rng.randrange(400)
                times = [
                    (load_ms, 2 * body_ms + (done + i) / PARTS, store_ms)
                    for i, (load_ms, body_ms, store_ms) in enumerate(
                        random_times(rng, kind, rng.choice((3, 20, 200)))
                    )
                ]
                go(pipeline, kind, times, stop)
                done += len(times)


def check_what_is_known_of_some_is_what_is_known_of_all() -> None:
    for kind, depth, seed in product(KINDS, (1, 3, 6), range(6)):
        rows: dict[int, dict[int, Row]] = {}
        for every in (1, 2, 4, 8):
            monitor = OverlapMonitor(every=every, capacity=CAPACITY)
            go_numbered(pipeline_of(depth, monitor=monitor), kind, seed, 600)
            rows[every] = rows_of(monitor)
            case = (kind, depth, seed, every)
            for number, row in rows[every].items():
                assert row == rows[1][number], (case, number, row, rows[1][number])
            assert len(rows[every]) > 0.4 * len(rows[1]) / every, (case, len(rows[every]))


def check_times_behind_a_long_gap() -> None:
    """Some 8 hours of loads between two bursts, of which a float of ms is exact to 2 ms."""
    gap: set[int] = set()
    rows: list[dict[int, Row]] = []
    for _ in range(2):
        monitor = OverlapMonitor(capacity=CAPACITY)
        pipeline = pipeline_of(2, monitor=monitor)
        load_ms = [1e6 if number in gap else 5.0 for number in range(300)]
        go(pipeline, "load", [(ms, 2 + i / PARTS, 0.0) for i, ms in enumerate(load_ms)])
        rows.append(rows_of(monitor))
        gap = {number for number in range(300) if not {number, number + 1} & set(rows[0])}
    assert len(gap) > 150
    assert set(rows[0]) == set(rows[1])
    for number, row in rows[0].items():
        assert row[_COMPUTE:] == rows[1][number][_COMPUTE:], (number, row, rows[1][number])


def check_a_session_that_begins_in_a_gap() -> None:
    """The fill is that of the last one whose beginning was timed."""
    monitor = OverlapMonitor()
    pipeline = pipeline_of(2, monitor=monitor)
    fills = []
    for number in range(80):
        go(pipeline, "load", [(4.0 + number, 5.0, 0.0)] * 5)
        fills.append(monitor.snapshot().fill_ms)
    assert monitor.snapshot().iterations == 400
    assert fills[:7] == [4.0 + number for number in range(7)], fills
    assert fills == sorted(fills) and 15 < len(set(fills)) < 35, fills


def check_all_are_timed_with_auto_depth() -> None:
    monitor = OverlapMonitor(every=4)
    pipeline = pipeline_of(2, monitor=monitor, auto_depth=AutoDepth(max_slots=4))
    go(pipeline, "load", [(2.0, 3.0, 0.0)] * 200)
    assert monitor.snapshot().timed == 200


def check_a_backlog_is_worked_off_in_steps() -> None:
    """The host is far ahead: in the first run nothing is over yet, in the second one all of it."""
    known: list[tuple[dict[str, Any], int, int]] = [
        ({"monitor": OverlapMonitor(every=1)}, 1, 32),
        ({"monitor": OverlapMonitor(every=4)}, 4, 32),
        ({"auto_depth": AutoDepth(max_slots=4)}, 1, 16),
    ]
    for how, every, most in known:
        pipeline = pipeline_of(2, **how)
        monitor = pipeline._monitor
        assert monitor is not None
        now(time_of(CALLERS[0]))
        go(pipeline, "load", [(2.0, 3.0, 0.0)] * 200 * every)
        assert monitor.snapshot().timed == 0
        now(time_of(CALLERS[0]))
        timed = []
        times = [(2.0, 3.0, 0.0)] * 200 * every
        look = monitor._look

        def note(depth: int, look: Any = look, monitor: Any = monitor) -> None:
            timed.append(monitor._timed)  # noqa: B023
            look(depth)

        monitor._look = note  # type: ignore[method-assign]
        go(pipeline, "load", times)
        steps = [after - before for before, after in zip([0, *timed], timed, strict=False)]
        assert max(steps) <= most and steps[:4] > [most - 2] * 4, steps
        assert steps[-1] == 0 and timed[-1] > 150, steps  # all of the first run, before the end
        now(1e30)
        found = monitor.snapshot()
        assert found.dropped == 0 and found.timed > timed[-1] + 150, found


def main() -> None:
    slot_order.set_up(sys.argv[2] if len(sys.argv) > 2 else None)
    now(1e30)
    report_checks(globals(), lambda: now(1e30))


if __name__ == "__main__":
    main()
