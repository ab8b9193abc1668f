"""Who has a ``SlotPipeline``: one thread at a time, with one run at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING

from jitkern.offload.streams import NONE, Streams

if TYPE_CHECKING:
    from jitkern.offload.slots import Slot


class Turn:
    """One going over a run. Its iterator is not kept: a `for` that is left drops it at once."""

    slots: weakref.ref[Generator[Slot, None, None]] | None = None

    def close(self) -> None:
        """End it, if it goes on."""
        slots = self.slots() if self.slots is not None else None
        if slots is not None:
            slots.close()


class Session:
    """From where the caller's stream is waited for to where it waits: of a run, or of `with`.

    Attributes
    ----------
    is_captured : bool
        Whether a graph is captured meanwhile.
    was_captured : bool
        Whether one ever was.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()  # held by a session
        self._thread = 0
        self._in_with = False
        self._turn: Turn | None = None  # of the run that goes on
        self.is_closed: bool = False
        self.is_captured: bool = False
        self.was_captured: bool = False

    def begin_run(self, turn: Turn, final_access: int) -> None:
        """Begin a run, in the session of `with` if there is one of this thread."""
        if self._in_with and self._turn is None and self._thread == threading.get_ident():
            if not self._streams.is_current():
                text = "torch's current stream is another one, expected the pipeline's compute"
                raise RuntimeError(f"SlotPipeline: {text} stream, as `with pipeline:` made it")
        else:
            self._begin()
        self._turn = turn
        self._streams.start(final_access)

    def end_run(self) -> None:
        """End the run, and its session unless that is of `with`."""
        self._turn = None
        try:
            self._streams.next(NONE, 0)
        finally:
            if not self._in_with:
                self._end()

    def begin_with(self) -> None:
        """Begin a session of several runs."""
        self._begin()
        self._in_with = True

    def end_with(self) -> None:
        """End it, and the run whose iterator somebody still holds."""
        try:
            if self._turn is not None:
                self._turn.close()
        finally:
            self._in_with = False
            self._end()

    def close(self) -> None:
        """Allow no session any more."""
        self._take()
        self.is_closed = True
        self._lock.release()

    def fork(self) -> None:
        """Have later copies wait for what the compute stream has been given."""
        if not self._in_with or self._thread != threading.get_ident():
            raise RuntimeError("SlotPipeline.fork: not inside `with pipeline:`, expected to be")
        self._streams.fork()

    def _begin(self) -> None:
        self._take()
        try:
            self.is_captured = self._streams.enter()
            self.was_captured |= self.is_captured
        except BaseException:
            self._lock.release()
            raise

    def _end(self) -> None:
        try:
            self._streams.leave()
        finally:
            self._lock.release()

    def _take(self) -> None:
        me = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            if self._thread != me:
                text = "in use by another thread; make a pipeline for each thread"
            elif self._turn is not None:
                text = (
                    "a run of it is not over; end it first, or use update() for both directions "
                    "at once, or a second pipeline"
                )
            else:
                text = "inside `with pipeline:` already; leave it first"
            raise RuntimeError(f"SlotPipeline: {text}")
        self._thread = me
        if self.is_closed:
            self._lock.release()
            raise RuntimeError("SlotPipeline: the pipeline is closed; make another one")
