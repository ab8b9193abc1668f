"""``OverlapMonitor``: whether a ``SlotPipeline``'s copies are hidden by its compute."""

from __future__ import annotations

import logging
import math
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from jitkern.args import int_arg, number_arg, type_text
from jitkern.offload.depth import Iteration

_log = logging.getLogger("jitkern.offload")

_ROW = struct.Struct("9d")  # as csrc/offload/slots.cc returns it
_BATCH = 16  # iterations per read, during which the pipeline's thread may wait
_STALLED = 0.05  # the share of its time that a stalled iteration waits
_HYSTERESIS = 1.1  # after an alarm the ratio must exceed this times `min_ratio` first

_CALL = "OverlapMonitor"


@dataclass(frozen=True)
class OverlapStats:
    """Results of an ``OverlapMonitor``. Means are over the monitor's last timed iterations.

    Ratios and times are NaN if no iteration has been timed.
    """

    name: str
    num_iterations: int  # queued so far, without those in captured graphs
    compute_ms: float  # mean time of a body
    transfer_ms: float  # mean time of a copy; of the longer one if a block is loaded and stored
    stall_ms: float  # mean time that the compute stream waited for a copy between two bodies
    ratio: float  # compute_ms / transfer_ms; below 1 no number of slots hides the copies
    stall_share: float  # the share of iterations that waited for over 5 % of their time
    moved_bytes: int  # in all iterations; each copy counts as a whole slot
    gb_per_s: float  # speed of the copies, both directions together
    num_alarms: int  # how often the ratio fell below the limit
    num_slots: int  # slots of the pipeline; 0 after it is closed


class OverlapMonitor:
    """Measures whether compute hides the copies of a ``SlotPipeline``, without synchronising.

    CUDA events time copies and bodies; they are read a few iterations later. The first 64
    iterations are timed, then 32 of every 256. A timed iteration takes about 10 us more host time
    and 6 us more on the GPU's streams. Iterations in captured graphs are not timed. Use one monitor
    per pipeline, which takes it as ``monitor=``. On the CPU, times are the host's.

    Parameters
    ----------
    num_timed_iterations : int, optional
        Means and alarms are over the last timed iterations, this many.
    min_ratio : float, optional
        If compute time divided by transfer time over that many is below this, the monitor logs a
        warning to ``jitkern.offload`` and calls `on_alarm`. Before the next alarm the ratio must
        rise 10 % above `min_ratio`.
    on_alarm : callable, optional
        ``on_alarm(stats)``, called by the thread of the run between two iterations.
    name : str, optional
        The pipeline's name in the log and in ``OverlapStats``.
    """

    def __init__(
        self,
        *,
        num_timed_iterations: int = 64,
        min_ratio: float = 1.5,
        on_alarm: Callable[[OverlapStats], object] | None = None,
        name: str = "pipeline",
    ) -> None:
        self._window = int_arg(_CALL, "num_timed_iterations", num_timed_iterations, 1, 2**31 - 1)
        self._min_ratio = number_arg(_CALL, "min_ratio", min_ratio)
        if on_alarm is not None and not callable(on_alarm):
            text = f"{type_text(on_alarm)}, expected a callable or None"
            raise TypeError(f"{_CALL}: on_alarm: {text}")
        self._on_alarm, self._name = on_alarm, str(name)
        # _attach sets these.
        self._pipeline: Callable[[], Any] = lambda: None
        self._slot_bytes = 0
        self._harvest: Callable[[int], bytes] | None = None
        self._observe: Callable[[Iteration, int], object] | None = None
        # The pipeline counts these.
        self._num_iterations = self._num_copies = 0
        self._lock = threading.Lock()  # guards the rest
        self._timed = deque[Iteration](maxlen=self._window)
        self._num_timed = self._checked_at = self._num_alarms = 0
        self._is_alarmed = False
        # The last iteration that was read.
        self._number, self._end = 0, 0.0
        self._stored: dict[float, float] = {}  # the end of each slot's last store

    def stats(self) -> OverlapStats:
        """Return the results so far, without iterations in flight. Any thread may call it."""
        pipeline = self._pipeline()
        with self._lock:
            while self._read():
                pass
            timed = list(self._timed)
        compute_ms, transfer_ms = _sums(timed)
        num_copies = sum((x.load_ms > 0) + (x.store_ms > 0) for x in timed)
        num_stalled = sum(x.stall_ms > _STALLED * (x.compute_ms + x.stall_ms) for x in timed)
        return OverlapStats(
            name=self._name,
            num_iterations=self._num_iterations,
            compute_ms=_quotient(compute_ms, len(timed)),
            transfer_ms=_quotient(transfer_ms, len(timed)),
            stall_ms=_quotient(sum(x.stall_ms for x in timed), len(timed)),
            ratio=_quotient(compute_ms, transfer_ms),
            stall_share=_quotient(num_stalled, len(timed)),
            moved_bytes=self._num_copies * self._slot_bytes,
            gb_per_s=_quotient(num_copies * self._slot_bytes, transfer_ms * 1e6),
            num_alarms=self._num_alarms,
            num_slots=0 if pipeline is None else pipeline.num_slots,
        )

    # -- called by the pipeline --------------------------------------------------------------------

    def _attach(
        self,
        pipeline: Any,
        harvest: Callable[[int], bytes],
        observe: Callable[[Iteration, int], object] | None,
    ) -> None:
        if self._harvest is not None:
            raise ValueError("SlotPipeline: monitor: that of another pipeline, expected a new one")
        self._harvest, self._observe = harvest, observe
        self._pipeline, self._slot_bytes = weakref.ref(pipeline), pipeline.slot_bytes

    def _update(self) -> None:
        """Read a batch of times and raise an alarm if one is due."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is in `stats` and reads them
        try:
            self._read()
            is_due = self._is_alarm_due()
        finally:
            self._lock.release()
        if is_due:
            self._num_alarms += 1
            now = self.stats()
            _log.warning(
                "%s: compute takes %.2f times as long as its copies, expected at least %.2f "
                "(%.3g ms and %.3g ms, %.0f %% of iterations stalled, %d slots)",
                *(now.name, now.ratio, self._min_ratio, now.compute_ms, now.transfer_ms),
                *(100 * now.stall_share, now.num_slots),
            )
            if self._on_alarm is not None:
                self._on_alarm(now)

    # -- with the lock held ------------------------------------------------------------------------

    def _is_alarm_due(self) -> bool:
        num_new = self._num_timed - self._checked_at
        if len(self._timed) < self._window or num_new < self._window // 4:
            return False
        self._checked_at = self._num_timed
        compute_ms, transfer_ms = _sums(self._timed)
        was_alarmed = self._is_alarmed
        if compute_ms >= _HYSTERESIS * self._min_ratio * transfer_ms:
            self._is_alarmed = False
        elif compute_ms < self._min_ratio * transfer_ms:
            self._is_alarmed = True
        return self._is_alarmed and not was_alarmed

    def _read(self) -> bool:
        """Add up to 16 iterations that are over; return whether there were any."""
        if self._harvest is None:
            return False
        rows = list(_ROW.iter_unpack(self._harvest(_BATCH)))
        for row in rows:
            self._add(*row)
        return len(rows) > 0

    def _add(self, *row: float) -> None:
        load, loaded, begin, end, store, stored, slot, number, is_first = row
        # A body waits for the body before it, and for the last copy of its slot.
        ready = self._stored.get(slot, 0.0) if math.isnan(load) else loaded
        could_begin, stall_ms = begin, 0.0
        follows = not is_first and number == self._number + 1
        if follows:
            could_begin = max(self._end, min(ready, begin))
            stall_ms = could_begin - self._end
        load_ms = 0.0 if math.isnan(load) else loaded - load
        store_ms = 0.0
        if not math.isnan(store):
            store_ms, self._stored[slot] = stored - store, stored
        self._number, self._end = int(number), end
        times = load_ms, end - could_begin, store_ms, stall_ms
        self._timed.append(Iteration(*times, follows, end - begin))
        self._num_timed += 1
        if self._observe is not None:
            self._observe(self._timed[-1], self._num_iterations)


def _sums(timed: Collection[Iteration]) -> tuple[float, float]:
    """Return the total ms of bodies, and of the longer copy of each iteration."""
    transfer_ms = sum(max(x.load_ms, x.store_ms) for x in timed)
    return sum(x.body_ms for x in timed), transfer_ms


def _quotient(value: float, by: float) -> float:
    return value / by if by else math.nan
