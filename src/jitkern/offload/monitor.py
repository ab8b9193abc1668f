"""``OverlapMonitor``: whether a ``SlotPipeline``'s copies hide behind its compute, as it runs."""

from __future__ import annotations

import logging
import math
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jitkern.args import int_arg, number_arg
from jitkern.offload.depth import Iteration

_log = logging.getLogger("jitkern.offload")

_ROW = struct.Struct("9d")  # of csrc/offload/slots.cc
_BATCH = 16  # iterations that are read in one call, in which the pipeline's thread may wait
_SHOWN = 1024  # iterations of a timeline, at most
_HYSTERESIS = 1.1  # times `min_ratio`: the ratio needed before the next alarm

_CALL = "OverlapMonitor"


@dataclass(frozen=True)
class OverlapSnapshot:
    """Figures of an ``OverlapMonitor`` at one time; NaN: not known yet."""

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
    depth: int  # slots of the pipeline; 0 once it is closed


class OverlapMonitor:
    """Times of the iterations of a ``SlotPipeline``, without a synchronisation.

    Events time copies and bodies, and are read a few iterations later. All iterations are counted;
    the first 64 are timed, then 32 of every 256. A timed one costs the host about 10 us more and
    the GPU's streams 6. Captured ones are not timed. A monitor is for one pipeline, its
    ``monitor=``. On the CPU the times are the host's.

    Parameters
    ----------
    window : int, optional
        Timed iterations that means and alarms are of.
    min_ratio : float, optional
        If the ratio of compute to transfer of a full window is below this: one line in the log
        ``jitkern.offload``, and `on_alarm`. The next alarm needs a ratio 10 % above it first.
    on_alarm : callable, optional
        ``on_alarm(snapshot)``, called in the run's thread between two iterations.
    name : str, optional
        In the log and in snapshots.
    """

    def __init__(
        self,
        *,
        window: int = 64,
        min_ratio: float = 1.5,
        on_alarm: Callable[[OverlapSnapshot], object] | None = None,
        name: str = "pipeline",
    ) -> None:
        self._window = int_arg(_CALL, "window", window, 1)
        self._min_ratio = number_arg(_CALL, "min_ratio", min_ratio)
        self._on_alarm, self._name = on_alarm, name
        self._lock = threading.Lock()
        # Times of begin and end of load, compute and store, and what follows from them.
        self._rows = deque[tuple[Sequence[float], Iteration]](maxlen=max(_SHOWN, self._window))
        self._harvest: Any = None  # of a pipeline
        self._num_dropped: Callable[[], int] = lambda: 0
        self._observe: Callable[[Iteration], object] | None = None
        self._iterations = self._copies = self._captured = 0  # by the pipeline
        self._timed = self._looked_at = self._alarms = 0
        self._pipeline: Callable[[], Any] = lambda: None
        self._slot_bytes = 0
        self._is_alarmed = False
        # Of the iteration that was read last.
        self._number, self._end, self._fill_ms = 0, 0.0, math.nan
        self._link_ends = [-math.inf, -math.inf]  # of loads and of stores
        self._stored: dict[float, float] = {}  # when a slot was stored last

    def snapshot(self) -> OverlapSnapshot:
        """Return what is known; any thread. Times of what is still under way are not in it."""
        self._poll()
        pipeline = self._pipeline()
        with self._lock:
            iterations, copies = self._iterations, self._copies
            rows = self._last(self._window)
            timed, fill_ms = self._timed, self._fill_ms
        count, stall_ms = len(rows), sum(one.stall_ms for _, one in rows)
        compute_ms, transfer_ms = _sums(rows)
        num_transfers = sum(2 - math.isnan(times[0]) - math.isnan(times[4]) for times, _ in rows)

        def by(value: float, other: float) -> float:
            return value / other if other else math.nan

        return OverlapSnapshot(
            *(self._name, iterations, self._captured, timed, self._num_dropped(), count),
            compute_ms=by(compute_ms, count),
            transfer_ms=by(transfer_ms, count),
            stall_ms=by(stall_ms, count),
            fill_ms=fill_ms,
            ratio=by(compute_ms, transfer_ms),
            stall_share=by(sum(one.is_stalled() for _, one in rows), count),
            bytes_moved=copies * self._slot_bytes,
            gb_s=by(num_transfers * self._slot_bytes, transfer_ms * 1e6),
            alarms=self._alarms,
            depth=0 if pipeline is None else pipeline.depth,
        )

    def timeline(self) -> dict[str, list[tuple[float, float]]]:
        """Return (begin, length) in ms of the last timed loads, computes, stores and stalls."""
        self._poll()
        with self._lock:
            rows = self._last(_SHOWN)
        spans = {}
        for i, lane in enumerate(("load", "compute", "store")):
            both = [times[2 * i : 2 * i + 2] for times, _ in rows]
            spans[lane] = [(begin, end - begin) for begin, end in both if not math.isnan(begin)]
        could_begin = [(times[3] - one.compute_ms, one.stall_ms) for times, one in rows]
        spans["stall"] = [(end - ms, ms) for end, ms in could_begin if ms > 0]
        return spans

    # -- what a pipeline does ----------------------------------------------------------------------

    def _attach(
        self, pipeline: Any, streams: Any, observe: Callable[[Iteration], object] | None
    ) -> None:
        if self._harvest is not None:
            raise ValueError("SlotPipeline: monitor: that of another pipeline, expected a new one")
        self._harvest, self._num_dropped = streams.harvest, streams.num_dropped
        self._observe = observe
        self._pipeline, self._slot_bytes = weakref.ref(pipeline), pipeline.slot_bytes

    def _poll(self, most: int = sys.maxsize) -> None:
        """Take the times of `most` iterations that are over, unless another thread does."""
        if self._harvest is None or not self._lock.acquire(blocking=False):
            return
        try:
            while most > 0:
                rows = list(_ROW.iter_unpack(self._harvest(min(_BATCH, most))))
                for row in rows:
                    self._add(*row)
                most = most - len(rows) if rows else 0
        finally:
            self._lock.release()

    def _add(self, *row: float) -> None:
        load, loaded, begin, end, store, stored, slot, number, is_first = row
        # A compute waits for the one before it, and for the last transfer of its slot.
        waited = self._stored.get(slot, 0.0) if math.isnan(load) else loaded
        could_begin, stall_ms = begin, 0.0
        follows = not is_first and number == self._number + 1
        if follows:
            could_begin = max(self._end, min(waited, begin))
            stall_ms = could_begin - self._end
        elif is_first:
            self._fill_ms = 0.0 if math.isnan(load) else begin - load
        load_ms, store_ms = self._link_ms(0, load, loaded), self._link_ms(1, store, stored)
        iteration = Iteration(load_ms, end - could_begin, store_ms, stall_ms, follows)
        self._number, self._end = int(number), end
        if not math.isnan(store):
            self._stored[slot] = stored
        self._rows.append((row[:6], iteration))
        self._timed += 1
        if self._observe is not None:
            self._observe(iteration)

    def _link_ms(self, direction: int, begin: float, end: float) -> float:
        """Return by how much longer a copy kept its link busy."""
        if math.isnan(begin):
            return 0.0
        last_end = self._link_ends[direction]
        self._link_ends[direction] = max(last_end, end)
        return max(end - max(begin, last_end), 0.0)

    def _last(self, count: int) -> list[tuple[Sequence[float], Iteration]]:
        """Return the last rows; the caller has the lock."""
        return list(islice(self._rows, max(0, len(self._rows) - count), None))

    def _look(self) -> None:
        """Give an alarm if one is due; in the run's thread."""
        if len(self._rows) < self._window or self._timed - self._looked_at < self._window // 4:
            return
        with self._lock:
            self._looked_at = self._timed
            compute_ms, transfer_ms = _sums(self._last(self._window))
        if compute_ms >= _HYSTERESIS * self._min_ratio * transfer_ms:
            self._is_alarmed = False
        elif not self._is_alarmed and compute_ms < self._min_ratio * transfer_ms:
            self._is_alarmed = True
            self._alarms += 1
            now = self.snapshot()
            _log.warning(
                "%s: compute takes %.2f times as long as its copies, expected at least %.2f "
                "(%.3g ms and %.3g ms, %.0f %% of %d iterations stalled, depth %d)",
                *(self._name, now.ratio, self._min_ratio, now.compute_ms, now.transfer_ms),
                *(100 * now.stall_share, now.window, now.depth),
            )
            if self._on_alarm is not None:
                self._on_alarm(now)


def _sums(rows: Sequence[tuple[Sequence[float], Iteration]]) -> tuple[float, float]:
    """Return the ms of bodies, and of the longer copy of each iteration."""
    compute_ms = sum(times[3] - times[2] for times, _ in rows)
    return compute_ms, sum(max(one.load_ms, one.store_ms) for _, one in rows)
