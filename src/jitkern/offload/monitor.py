"""``OverlapMonitor``: whether a ``SlotPipeline``'s copies hide behind its compute, as it runs."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from array import array
from collections import deque
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
_ROWS = 16  # harvested in one call

_CALL = "OverlapMonitor"
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
        """Have the monitor take the times that are there."""


class OverlapMonitor:
    """Times of every iteration of a ``SlotPipeline``, without a synchronisation.

    Copies and bodies are timed by events, which are read a few iterations later, once they are
    done. Given to a pipeline as ``monitor=``; to another one once that is closed or gone. While a
    graph is captured nothing is timed, as replays have no times of their own; iterations are
    counted. On the CPU, where nothing overlaps, the times are the host's.

    Parameters
    ----------
    window : int, optional
        Iterations that means and alarms are of.
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
        Iterations whose times may wait to be read, and that a plot shows; the oldest go first.
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
        min_ratio: float = 1.5,
        hysteresis: float = 0.1,
        stall_fraction: float = 0.05,
        on_alarm: Callable[[OverlapSnapshot], object] | None = None,
        capacity: int = 1024,
        name: str = "pipeline",
    ) -> None:
        size = count_arg(_CALL, "window", window)
        self.capacity = count_arg(_CALL, "capacity", capacity)
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
        self._columns = array("d", bytes(8 * _NUM_COLUMNS * _ROWS))
        self._window_size = size
        self._means = {c: deque[float](maxlen=size) for c in (_COMPUTE, _TRANSFER, _STALL)}
        self._transfers = deque[float](maxlen=size)
        self._stalled = deque[bool](maxlen=size)
        self._timeline = [deque[float](maxlen=self.capacity) for _ in _TIMELINE]
        self._stalls = deque[float](maxlen=self.capacity)
        self._iterations = self._captured = self._alarms = self._bytes = 0
        self._slot_bytes = self._dropped = self._dropped_before = 0
        self._fill_ms = math.nan
        self._is_alarmed = self._is_warned = False

    def snapshot(self) -> OverlapSnapshot:
        """Return what is known. Iterations that are still under way are not in it; any thread."""
        pipeline = self._pipeline() if self._pipeline is not None else None
        if pipeline is not None:
            pipeline._poll()
        with self._lock:
            return self._snapshot(0 if pipeline is None else pipeline.depth)

    def collector(self) -> Collector:
        """Return a collector for a registry of ``prometheus_client``.

        Raises
        ------
        UnsupportedError
            ``prometheus_client`` is not installed.

        Examples
        --------
        >>> prometheus_client.REGISTRY.register(monitor.collector())  # doctest: +SKIP
        """
        from jitkern.offload.metrics import Collector

        return Collector(self.snapshot)

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
            moments = [list(column) for column in self._timeline]
            stalls = list(self._stalls)
        timeline.draw(Path(path), self._name, moments, stalls)

    # -- what a pipeline does ----------------------------------------------------------------------

    def _attach(self, pipeline: Measured) -> None:
        before = self._pipeline() if self._pipeline is not None else None
        if before is not None:
            raise ValueError(
                "SlotPipeline: monitor: that of another pipeline, expected one of its own, or "
                "that of a closed one"
            )
        self._pipeline = weakref.ref(pipeline)
        self._slot_bytes = pipeline.slot_bytes
        self._dropped_before, self._dropped = self._dropped_before + self._dropped, 0

    def _detach(self) -> None:
        self._pipeline = None

    def _count_captured(self) -> None:
        self._captured += 1

    def _poll(self, streams: Streams, observer: Observer | None) -> None:
        """Take the times that are there, unless another thread is about it."""
        if not self._polls.acquire(blocking=False):
            return
        try:
            address = self._columns.buffer_info()[0]
            count = _ROWS
            while count == _ROWS:
                count = streams.harvest(address, _ROWS)
                if count > 0:
                    self._take(count, streams.num_dropped(), observer)
        finally:
            self._polls.release()

    def _take(self, count: int, dropped: int, observer: Observer | None) -> None:
        columns = self._columns

        def column(number: int) -> array[float]:
            return columns[_ROWS * number : _ROWS * number + count]

        compute, stall = column(_COMPUTE), column(_STALL)
        fills, transfers = column(_FILL), column(_TRANSFERS)
        part = self._stall_fraction
        with self._lock:
            self._iterations += count
            self._dropped = dropped
            self._bytes += int(sum(transfers)) * self._slot_bytes
            self._means[_COMPUTE].extend(compute)
            self._means[_TRANSFER].extend(column(_TRANSFER))
            self._means[_STALL].extend(stall)
            self._transfers.extend(transfers)
            self._stalled.extend([s > part * (c + s) for c, s in zip(compute, stall, strict=True)])
            for number in _TIMELINE:
                self._timeline[number].extend(column(number))
            self._stalls.extend(stall)
            for fill_ms in fills:
                if fill_ms >= 0:
                    self._fill_ms = fill_ms
        if observer is not None:
            follows = [fill_ms < 0 for fill_ms in fills]
            for times_ms in zip(*map(column, _LINKS), stall, follows, strict=True):
                observer(*times_ms)

    def _look(self, depth: int) -> None:
        """Say what is to be said once a window is full; in the run's thread."""
        if len(self._transfers) < self._window_size:
            return
        compute_ms, transfer_ms = sum(self._means[_COMPUTE]), sum(self._means[_TRANSFER])
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

    def _snapshot(self, depth: int) -> OverlapSnapshot:
        count = len(self._transfers)
        compute_ms, transfer_ms, stall_ms = (sum(values) for values in self._means.values())

        def by(value: float, other: float) -> float:
            return value / other if other else math.nan

        moved = sum(self._transfers) * self._slot_bytes
        return OverlapSnapshot(
            name=self._name,
            iterations=self._iterations,
            captured=self._captured,
            dropped=self._dropped_before + self._dropped,
            window=count,
            compute_ms=by(compute_ms, count),
            transfer_ms=by(transfer_ms, count),
            stall_ms=by(stall_ms, count),
            fill_ms=self._fill_ms,
            ratio=by(compute_ms, transfer_ms),
            stall_share=by(sum(self._stalled), count),
            bytes_moved=self._bytes,
            gb_s=by(moved, transfer_ms * 1e6),
            alarms=self._alarms,
            depth=depth,
        )
