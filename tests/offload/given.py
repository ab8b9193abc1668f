"""An ``OverlapMonitor`` whose times are given by a test."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from jitkern.offload import OverlapMonitor

Row = tuple[float, float, float]
"""Milliseconds of compute, transfer and stall of an iteration."""


class Given:
    """A pipeline of which only times are known.

    Attributes
    ----------
    reads : list of int
        Iterations that were read, call by call.
    """

    slot_bytes = 1 << 20
    depth = 3

    def __init__(self, monitor: OverlapMonitor) -> None:
        self.monitor = monitor
        self.rows: list[Row] = []
        self.reads: list[int] = []
        self.num_queued = 0
        monitor._attach(self)  # type: ignore[arg-type]

    def harvest(self, address: int, most: int, summary: int) -> int:
        monitor = self.monitor
        assert (address, summary) == (
            monitor._read.buffer_info()[0],
            monitor._summary.buffer_info()[0],
        )
        rows, self.rows = self.rows[:most], self.rows[most:]
        for number, (compute, transfer, stall) in enumerate(rows):
            values = [*[math.nan] * 6, compute, transfer, stall, -1.0, transfer, compute, 0, 1]
            monitor._read[14 * number : 14 * number + 14] = array("d", values)
        for what, value in enumerate((len(rows), self.num_queued, self.num_queued, 0)):
            monitor._summary[what] = value
        self.reads.append(len(rows))
        return len(rows)

    def _poll(self, most: int = 0) -> None:
        self.monitor._poll(self.harvest, None, most)

    def queue(self, rows: Iterable[Row]) -> None:
        """Let iterations be over, whose times nobody has read yet."""
        before = len(self.rows)
        self.rows += rows
        self.num_queued += len(self.rows) - before

    def add(self, rows: Iterable[Row]) -> None:
        """As a pipeline does at the end of these iterations."""
        self.queue(rows)
        self._poll()
        self.monitor._look(self.depth)
