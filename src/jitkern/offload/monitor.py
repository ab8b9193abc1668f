"""``OverlapMonitor``: whether a ``SlotPipeline``'s copies hide behind its compute, as it runs."""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jitkern.offload.args import count_arg, function_arg, number_arg
from jitkern.offload.snapshot import OverlapSnapshot

if TYPE_CHECKING:
    from jitkern.offload.metrics import Collector
    from jitkern.offload.streams import Streams

_log = logging.getLogger("jitkern.offload")

# Columns of the times of an iteration, as in csrc/offload/slots.h.
_TIMELINE = range(6)  # begin and end of load, compute and store
_COMPUTE, _TRANSFER, _STALL, _FILL = range(6, 10)
_LINKS = range(10, 13)  # by which load, compute and store kept the link or the GPU busy
_TRANSFERS = 13
_NUM_COLUMNS = 14
# And what else is told with them.
_NUM_ROWS, _ITERATIONS, _ALL_TRANSFERS, _DROPPED, _FILL_MS = range(5)
_BATCH = 16  # iterations that are read in one call

_CALL = "OverlapMonitor"
_MOST_EVERY = 1000
_SMALL_BYTES = 1_000_000  # below, what a copy costs besides its bytes shows

Observer = Callable[[float, float, float, float, bool], object]
"""``DepthController.observe``."""


class Measured(Protocol):
    """What a monitor knows of its pipeline."""

    @property
    def slot_bytes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def _poll(self) -> None:
        """Have the monitor take all times that are there."""


class OverlapMonitor:
    """Times of iterations of a ``SlotPipeline``, without a synchronisation.

    Copies and bodies are timed by events, which are read a few iterations later, once they are
    done. Events with times are dear, so one iteration in four has them: the first 32 of a pipeline,
    and then bursts of some that follow each other. All are counted; means, stalls, alarms and plots
    are of those that were timed. Given to a pipeline as ``monitor=``; to another one once that is
    closed or gone. While a graph is captured nothing is timed, as replays have no times of their
    own; iterations are counted. On the CPU, where nothing overlaps, the times are the host's.

    Parameters
    ----------
    window : int, optional
        Timed iterations that means and alarms are of.
    every : int, optional
        One iteration in so many is timed, 1 to 1000; with 1 all are, as under `auto_depth`. On an
        H200 a timed iteration of two accesses costs the host about 5 us more, and the GPU's streams
        6; an average one a quarter of it with 4.
    min_ratio : float, optional
        An alarm is a ratio of compute to transfer below this, once a window is full: one line of
        the log ``jitkern.offload``, and `on_alarm`.
    hysteresis : float, optional
        The next alarm is given after the ratio was `min_ratio` and this part of it more.
    stall_fraction : float, optional
        An iteration is stalled if it waited for more than this part of its time.
    on_alarm : callable, optional
        ``on_alarm(snapshot)``, called in the run's thread between two iterations. What it raises
        ends the run.
    capacity : int, optional
        Timed iterations that may wait to be read, and that a plot shows; the oldest go first. Each
        takes 112 bytes.
    name : str, optional
        In the log, in snapshots and metrics.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.

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
        hysteresis: float = 0.1,
        stall_fraction: float = 0.05,
        on_alarm: Callable[[OverlapSnapshot], object] | None = None,
        capacity: int = 1024,
        name: str = "pipeline",
    ) -> None:
        self._window = count_arg(_CALL, "window", window)
        self.every: int = count_arg(_CALL, "every", every, _MOST_EVERY)
        self.capacity: int = count_arg(_CALL, "capacity", capacity)
        self._min_ratio = number_arg(_CALL, "min_ratio", min_ratio)
        self._calm_ratio = self._min_ratio * (1 + number_arg(_CALL, "hysteresis", hysteresis))
        self._stall_fraction = number_arg(_CALL, "stall_fraction", stall_fraction)
        if on_alarm is not None:
            function_arg(_CALL, "on_alarm", on_alarm)
        if not isinstance(name, str):
            raise TypeError(f"{_CALL}: name: {type(name).__name__}, expected a str")
        self._on_alarm, self._name = on_alarm, name
        self._pipeline: weakref.ref[Measured] | None = None
        self._lock = threading.Lock()
        self._polls = threading.Lock()
        # The last rows, where they are written: to go over each here took 0.3 us more.
        self._size = max(self.capacity, self._window)
        self._rows = array("d", bytes(8 * _NUM_COLUMNS * self._size))
        self._summary = array("d", [0.0, 0.0, 0.0, 0.0, math.nan])
        self._timed = self._looked_at = 0
        self._first = 0  # of the present pipeline: another one's rows are no part of its window
        self._before = (0, 0, 0)  # iterations, bytes and dropped ones of former pipelines
        self._captured = self._alarms = self._slot_bytes = 0
        self._is_alarmed = self._is_warned = False

    def snapshot(self) -> OverlapSnapshot:
        """Return what is known; any thread. Times of what is still under way are not in it."""
        pipeline = self._pipeline() if self._pipeline is not None else None
        if pipeline is not None:
            pipeline._poll()
        return self._snapshot(0 if pipeline is None else pipeline.depth)

    def collector(self, *others: OverlapMonitor) -> Collector:
        """Return a collector for a registry of ``prometheus_client``.

        Parameters
        ----------
        *others : OverlapMonitor
            More that belong to this registry, which takes one collector of these figures; each
            monitor has its name for the label ``pipeline``.

        Raises
        ------
        TypeError
            One of `others` is no OverlapMonitor.
        UnsupportedError
            ``prometheus_client`` is not installed.
        ValueError
            Two have the same name.

        Examples
        --------
        >>> prometheus_client.REGISTRY.register(monitor.collector())  # doctest: +SKIP
        """
        from jitkern.offload.metrics import Collector

        names = [self._name]
        for other in others:
            if not isinstance(other, OverlapMonitor):
                raise TypeError(
                    f"{_CALL}.collector: others: {type(other).__name__}, expected an OverlapMonitor"
                )
            if other._name in names:
                raise ValueError(
                    f"{_CALL}.collector: others: two monitors of the name {other._name!r}, "
                    "expected a name= of its own for each"
                )
            names.append(other._name)
        return Collector([monitor.snapshot for monitor in (self, *others)])

    def plot(self, path: str | Path) -> None:
        """Draw the last iterations, a lane each for loads, compute, stores and stalls.

        Parameters
        ----------
        path : str or Path
            Of an image; its suffix says of which kind.

        Raises
        ------
        UnsupportedError
            matplotlib is not installed.
        ValueError
            There is no iteration yet.
        """
        from jitkern.offload import timeline

        self.snapshot()
        with self._lock:
            moments = [self._last(column, self.capacity) for column in _TIMELINE]
            bodies_ms = self._last(_LINKS[1], self.capacity)
            stalls_ms = self._last(_STALL, self.capacity)
        # A stall ends where the body could begin: a late host comes behind it.
        ends_ms = [end - ms for end, ms in zip(moments[3], bodies_ms, strict=True)]
        timeline.draw(Path(path), self._name, moments, (ends_ms, stalls_ms))

    # -- what a pipeline does ----------------------------------------------------------------------

    def _attach(self, pipeline: Measured) -> None:
        before = self._pipeline() if self._pipeline is not None else None
        if before is not None:
            raise ValueError(
                "SlotPipeline: monitor: that of another pipeline, expected one of its own, or "
                "that of a closed one"
            )
        self._pipeline = weakref.ref(pipeline)
        self._before, self._first = self._counts(), self._timed
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

    def _count_captured(self) -> None:
        self._captured += 1

    def _poll(self, streams: Streams, observer: Observer | None, most: int) -> None:
        """Take the times that are there, of `most` iterations or of all (0).

        Not where another thread is about it.
        """
        if not self._polls.acquire(blocking=False):
            return
        rows, summary = self._rows.buffer_info()[0], self._summary.buffer_info()[0]
        left = most or sys.maxsize
        try:
            while left > 0:
                at = self._timed % self._size
                asked = min(_BATCH, left, self._size - at)
                with self._lock:
                    read = streams.harvest(rows + 8 * at, self._size, asked, summary)
                    self._timed += int(self._summary[_NUM_ROWS])
                if observer is not None:
                    self._observe(at, int(self._summary[_NUM_ROWS]), observer)
                if read < asked:
                    break
                left -= read
        finally:
            self._polls.release()

    def _observe(self, at: int, count: int, observer: Observer) -> None:
        begins = [column * self._size + at for column in (*_LINKS, _STALL, _FILL)]
        columns = [self._rows[begin : begin + count] for begin in begins]
        for load, compute, store, stall, fill in zip(*columns, strict=True):
            observer(load, compute, store, stall, fill < 0)

    def _last(self, column: int, most: int) -> array[float]:
        """Return a column of the pipeline's last rows, of `most` or of those that there are."""
        count = min(most, self._timed - self._first)
        begin, at = column * self._size, self._timed % self._size
        if count <= at:
            return self._rows[begin + at - count : begin + at]
        end = begin + self._size
        return self._rows[end - (count - at) : end] + self._rows[begin : begin + at]

    def _look(self, depth: int) -> None:
        """Say what is to be said once a window is full; in the run's thread."""
        # The two sums of 64 rows take 1.8 us: they are for 16 more, and not for each.
        new, step = self._timed - self._looked_at, max(1, self._window // 4)
        if self._timed - self._first < self._window or new < step:
            return
        with self._lock:
            self._looked_at = self._timed
            compute_ms, transfer_ms = self._sum(_COMPUTE), self._sum(_TRANSFER)
        if not self._is_warned and self._slot_bytes < _SMALL_BYTES:
            self._is_warned = True
            _log.warning(
                "%s: copies of %.3g MB reach %.3g GB/s; larger slots, of 1 MB and more, hide what "
                "a copy costs besides its bytes",
                self._name,
                self._slot_bytes / 1e6,
                self._snapshot(depth).gb_s,
            )
        if compute_ms >= self._calm_ratio * transfer_ms:
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

    def _sum(self, column: int) -> float:
        return sum(self._last(column, self._window))

    def _snapshot(self, depth: int) -> OverlapSnapshot:
        with self._lock:
            iterations, moved, dropped = self._counts()
            compute, stall = (self._last(c, self._window) for c in (_COMPUTE, _STALL))
            transfer_ms, transfers = self._sum(_TRANSFER), self._sum(_TRANSFERS)
            timed, fill_ms = self._timed, self._summary[_FILL_MS]
        count, compute_ms, part = len(compute), sum(compute), self._stall_fraction
        stalled = [s > part * (c + s) for c, s in zip(compute, stall, strict=True)]

        def by(value: float, other: float) -> float:
            return value / other if other else math.nan

        return OverlapSnapshot(
            name=self._name,
            iterations=iterations,
            captured=self._captured,
            timed=timed,
            dropped=dropped,
            window=count,
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
