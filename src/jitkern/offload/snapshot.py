"""``OverlapSnapshot``: the figures of an ``OverlapMonitor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapSnapshot:
    """What an ``OverlapMonitor`` knows at one time. NaN: nothing is known yet.

    Attributes
    ----------
    name : str
        Of the monitor.
    iterations, captured : int
        That were queued, also those that are still under way; in captures, apart from these.
    timed, dropped : int
        Of `iterations`: whose times are known; whose times were not read in time.
    window : int
        Timed iterations that the means are of.
    compute_ms, transfer_ms, stall_ms : float
        Means of the window: of a body; of its copy, of the longer one where there are two; of the
        time that the compute stream waited for a copy between the former body and this one.
    fill_ms : float
        Before the first body of a session, in which nothing could be hidden: of the last session
        whose first iteration was timed.
    ratio : float
        Compute by transfer, in the window. Below 1 copies cannot be hidden.
    stall_share : float
        Part of the window's iterations that were stalled.
    bytes_moved : int
        By all iterations, a slot's bytes for each copy.
    gb_s : float
        Of copies, in the window; both directions together.
    alarms : int
        How often the ratio fell below the limit.
    depth : int
        Slots of the pipeline, 0 without one.
    """

    name: str
    iterations: int
    captured: int
    timed: int
    dropped: int
    window: int
    compute_ms: float
    transfer_ms: float
    stall_ms: float
    fill_ms: float
    ratio: float
    stall_share: float
    bytes_moved: int
    gb_s: float
    alarms: int
    depth: int
