"""``OverlapMonitor``: whether a ``SlotPipeline``'s copies hide behind its compute, as it runs."""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jitkern.offload.args import count_arg, number_arg

_log = logging.getLogger("jitkern.offload")

# Columns of a row of csrc/offload/slot_times.h, after begin and end of load, compute and store.
_COMPUTE, _TRANSFER, _STALL, _FILL = range(6, 10)
_LINKS = slice(10, 13)  # by which load, compute and store kept the link or the GPU busy
_TRANSFERS = 13
_NUM_COLUMNS = 14
# What is told with the rows.
_NUM_ROWS, _ITERATIONS, _ALL_TRANSFERS, _DROPPED, _FILL_MS = range(5)
_BATCH = 16  # iterations that are read in one call

_CALL = "OverlapMonitor"
_MOST_EVERY = 1000
_HYSTERESIS = 1.1  # the ratio, in units of the limit, after which the next alarm may come
_STALLED = 0.05  # part of its time that a stalled iteration waits for, at least

Row = Sequence[float]
Observer = Callable[[float, float, float, float, bool], object]
"""``DepthController.observe``."""


@dataclass(frozen=True)
class OverlapSnapshot:
    """What an ``OverlapMonitor`` knows at one time. NaN: nothing is known yet."""

    name: str
    iterations: int  # queued so far, also those still under way
    captured: int  # in captures, which `iterations` leaves out
    timed: int  # whose times are known
    dropped: int  # whose times were not read in time
    window: int  # timed iterations that the means are of
    compute_ms: float  # mean of a body
    transfer_ms: float  # mean of a copy, the longer one if there are two
    stall_ms: float  # mean that the compute stream waited for a copy between two bodies
    fill_ms: float  # before the first body of a session, in which nothing can be hidden
    ratio: float  # compute by transfer; below 1 copies cannot be hidden
    stall_share: float  # part of the window's iterations that waited for over 5 % of their time
    bytes_moved: int  # a slot's bytes for each copy of all iterations
    gb_s: float  # of copies in the window; both directions together
    alarms: int  # how often the ratio fell below the limit
    depth: int  # slots of the pipeline, 0 without one


class OverlapMonitor:
    """Times of iterations of a ``SlotPipeline``, without a synchronisation.

    Events time copies and bodies, and are read a few iterations later. All iterations are counted;
    the first 32 are timed, then one in four, in bursts. Captured ones are not timed. A monitor is
    for one pipeline at a time, its ``monitor=``. On the CPU the times are the host's.

    Parameters
    ----------
    window : int, optional
        Timed iterations that means and alarms are of.
    every : int, optional
        One iteration in so many is timed, 1 to 1000. On an H200 a timed one costs the host about
        5 us more and the GPU's streams 6.
    min_ratio : float, optional
        If the ratio of compute to transfer of a full window is below this: one line in the log
        ``jitkern.offload``, and `on_alarm`. The next alarm needs a ratio 10 % above it first.
    on_alarm : callable, optional
        ``on_alarm(snapshot)``, called in the run's thread between two iterations.
    capacity : int, optional
        Timed iterations that may wait to be read, and that :meth:`timeline` shows.
    name : str, optional
        In the log and in snapshots.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import OverlapMonitor, SlotPipeline
    >>> monitor = OverlapMonitor(name="weights")
    >>> pipeline = SlotPipeline(
    ...     num_slots=2, slot_shape=[3], dtype=torch.int64, device="cpu", monitor=monitor
    ... )
    >>> for slot in pipeline.load(range(5), copy=lambda tensor, block: tensor.fill_(block)):
    ...     pass
    >>> monitor.snapshot().iterations, monitor.snapshot().bytes_moved
    (5, 120)
    """

    def __init__(
        self,
        *,
        window: int = 64,
        every: int = 4,
        min_ratio: float = 1.5,
        on_alarm: Callable[[OverlapSnapshot], object] | None = None,
        capacity: int = 1024,
        name: str = "pipeline",
    ) -> None:
        self._window = count_arg(_CALL, "window", window)
        self.every: int = count_arg(_CALL, "every", every, _MOST_EVERY)
        self.capacity: int = count_arg(_CALL, "capacity", capacity)
        self._min_ratio = number_arg(_CALL, "min_ratio", min_ratio)
        self._on_alarm, self._name = on_alarm, name
        self._pipeline: weakref.ref[Any] | None = None
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque(maxlen=max(self.capacity, self._window))
        # C++ writes these.
        self._read = array("d", bytes(8 * _NUM_COLUMNS * _BATCH))
        self._summary = array("d", [0.0, 0.0, 0.0, 0.0, math.nan])
        self._timed = self._looked_at = self._captured = self._alarms = self._slot_bytes = 0
        self._before = (0, 0, 0)  # iterations, bytes and dropped ones of former pipelines
        self._is_alarmed = False

    def snapshot(self) -> OverlapSnapshot:
        """Return what is known; any thread. Times of what is still under way are not in it."""
        pipeline = self._pipeline() if self._pipeline is not None else None
        if pipeline is not None:
            pipeline._poll()
        return self._snapshot(0 if pipeline is None else pipeline.depth)

    def timeline(self) -> dict[str, list[tuple[float, float]]]:
        """Return (begin, length) in ms of the last timed loads, computes, stores and stalls."""
        self.snapshot()
        with self._lock:
            rows = list(self._rows)[-self.capacity :]
        spans = {}
        for i, lane in enumerate(("load", "compute", "store")):
            both = [(row[2 * i], row[2 * i + 1]) for row in rows]
            spans[lane] = [(begin, end - begin) for begin, end in both if not math.isnan(begin)]
        could_begin = [(row[3] - row[_LINKS][1], row[_STALL]) for row in rows]
        spans["stall"] = [(end - ms, ms) for end, ms in could_begin if ms > 0]
        return spans

    # -- what a pipeline does ----------------------------------------------------------------------

    def _attach(self, pipeline: Any) -> None:
        before = self._pipeline() if self._pipeline is not None else None
        if before is not None:
            raise ValueError(
                "SlotPipeline: monitor: that of another pipeline, expected one of its own, or "
                "that of a closed one"
            )
        self._pipeline = weakref.ref(pipeline)
        # Counters go on; means are of slots of one size.
        self._before = self._counts()
        self._rows.clear()
        self._summary[:] = array("d", [0.0, 0.0, 0.0, 0.0, math.nan])
        self._slot_bytes = pipeline.slot_bytes

    def _detach(self) -> None:
        self._pipeline = None

    def _counts(self) -> tuple[int, int, int]:
        """Return iterations, bytes moved and dropped iterations."""
        iterations, transfers, dropped = map(int, self._summary[_ITERATIONS:_FILL_MS])
        before = self._before
        moved = transfers * self._slot_bytes
        return before[0] + iterations, before[1] + moved, before[2] + dropped

    def _poll(self, harvest: Any, observer: Observer | None, most: int) -> None:
        """Take the times of `most` iterations, or of all (0), unless another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        rows, summary = self._read.buffer_info()[0], self._summary.buffer_info()[0]
        left = most or sys.maxsize
        try:
            while left > 0:
                asked = min(_BATCH, left)
                read = harvest(rows, asked, summary)
                for number in range(int(self._summary[_NUM_ROWS])):
                    begin = number * _NUM_COLUMNS
                    row = tuple(self._read[begin : begin + _NUM_COLUMNS])
                    self._rows.append(row)
                    self._timed += 1
                    if observer is not None:
                        load_ms, compute_ms, store_ms = row[_LINKS]
                        observer(load_ms, compute_ms, store_ms, row[_STALL], row[_FILL] < 0)
                if read < asked:
                    break
                left -= read
        finally:
            self._lock.release()

    def _last(self, column: int) -> list[float]:
        """Return a column of the window; the caller has the lock."""
        first = max(0, len(self._rows) - self._window)
        return [row[column] for row in islice(self._rows, first, None)]

    def _look(self, depth: int) -> None:
        """Give an alarm if one is due; in the run's thread."""
        if len(self._rows) < self._window or self._timed - self._looked_at < self._window // 4:
            return
        with self._lock:
            self._looked_at = self._timed
            compute_ms, transfer_ms = sum(self._last(_COMPUTE)), sum(self._last(_TRANSFER))
        if compute_ms >= _HYSTERESIS * self._min_ratio * transfer_ms:
            self._is_alarmed = False
        elif not self._is_alarmed and compute_ms < self._min_ratio * transfer_ms:
            self._is_alarmed = True
            self._alarms += 1
            now = self._snapshot(depth)
            _log.warning(
                "%s: compute takes %.2f times as long as its copies, expected at least %.2f "
                "(%.3g ms and %.3g ms, %.0f %% of %d iterations stalled, depth %d)",
                *(self._name, now.ratio, self._min_ratio, now.compute_ms, now.transfer_ms),
                *(100 * now.stall_share, now.window, depth),
            )
            if self._on_alarm is not None:
                self._on_alarm(now)

    def _snapshot(self, depth: int) -> OverlapSnapshot:
        with self._lock:
            iterations, moved, dropped = self._counts()
            compute, stall = self._last(_COMPUTE), self._last(_STALL)
            transfer_ms, transfers = sum(self._last(_TRANSFER)), sum(self._last(_TRANSFERS))
            timed, fill_ms = self._timed, self._summary[_FILL_MS]
        count, compute_ms = len(compute), sum(compute)
        stalled = [s > _STALLED * (c + s) for c, s in zip(compute, stall, strict=True)]

        def by(value: float, other: float) -> float:
            return value / other if other else math.nan

        return OverlapSnapshot(
            *(self._name, iterations, self._captured, timed, dropped, count),
            compute_ms=by(compute_ms, count),
            transfer_ms=by(transfer_ms, count),
            stall_ms=by(sum(stall), count),
            fill_ms=fill_ms,
            ratio=by(compute_ms, transfer_ms),
            stall_share=by(sum(stalled), count),
            bytes_moved=moved,
            gb_s=by(transfers * self._slot_bytes, transfer_ms * 1e6),
            alarms=self._alarms,
            depth=depth,
        )
