"""Who has a ``SlotPipeline``: one thread at a time, with one run at a time.

A signal's handler may raise between any two steps. So it is one assignment that takes a pipeline
and one that gives it back, and what comes before the latter can be done again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from jitkern.offload.streams import NONE, Streams

if TYPE_CHECKING:
    from jitkern.offload.slots import Slot, SlotSet


class Turn:
    """One going over a run, or one `with`.

    Its iterator is not kept: a `for` that is left drops it at once.
    """

    slots: weakref.ref[Generator[Slot, None, None]] | None = None
    thread: int = 0  # that began it

    def __init__(self, is_with: bool = False) -> None:
        self.is_with: bool = is_with

    def close(self) -> None:
        """End it, if it goes on."""
        slots = self.slots() if self.slots is not None else None
        if slots is not None:
            slots.close()

    def is_gone(self) -> bool:
        """Tell whether its iterator has come to an end, also if it has not ended its session."""
        slots: Any = self.slots() if self.slots is not None else None
        return not self.is_with and (slots is None or slots.gi_frame is None)


class Session:
    """From where the caller's stream is waited for to where it waits: of a run, or of `with`.

    Attributes
    ----------
    holder : Turn or None
        Whose the session is.
    is_captured : bool
        Whether a graph is captured meanwhile.
    was_captured : bool
        Whether one ever was.
    """

    def __init__(self, streams: Streams, slots: SlotSet) -> None:
        self._streams = streams
        self._slots = slots
        # Of what is below, for a moment: a run may be dropped in any thread.
        self._mutex = threading.RLock()
        self.holder: Turn | None = None
        self._turn: Turn | None = None  # of the run that goes on
        self.is_closed: bool = False
        self.is_captured: bool = False
        self.was_captured: bool = False

    def begin_run(self, turn: Turn, final_access: int) -> None:
        """Begin a run, in the session of `with` if there is one of this thread."""
        with self._mutex:
            self._end_gone()
            turn.thread = threading.get_ident()
            holder = self.holder
            is_inside = holder is not None and holder.is_with and holder.thread == turn.thread
            if not is_inside or self._turn is not None:
                self._begin(turn)
            elif not self._streams.is_current():
                text = "torch's current stream is another one, expected the pipeline's compute"
                raise RuntimeError(f"SlotPipeline: {text} stream, as `with pipeline:` made it")
            self._turn = turn
            self._streams.start(final_access)

    def end_run(self, turn: Turn) -> None:
        """End the run, and its session unless that is of `with`; do nothing if it is over.

        If this raises, the next call goes on with it.
        """
        with self._mutex:
            if self._turn is not turn and self.holder is not turn:
                return
            self._streams.next(NONE, 0)
            self._slots.take_back()
            if self.holder is turn:
                self._streams.leave()
            self._turn = None
            if self.holder is turn:
                self.holder = None

    def begin_with(self, holder: Turn) -> None:
        """Begin a session of several runs."""
        with self._mutex:
            self._end_gone()
            holder.thread = threading.get_ident()
            self._begin(holder)

    def end_with(self, holder: Turn | None) -> None:
        """End it, and the run whose iterator somebody still holds; else as `end_run`."""
        if holder is None or not holder.is_with or self.holder is not holder:
            return
        turn = self._turn
        if turn is not None:
            try:
                turn.close()
            finally:
                self.end_run(turn)
        with self._mutex:
            if self.holder is holder:
                self._streams.leave()
                self.holder = None

    def close(self) -> None:
        """Allow no session any more."""
        with self._mutex:
            self._end_gone()
            self._require_free()
            self.is_closed = True

    def fork(self) -> None:
        """Have later copies wait for what the compute stream has been given."""
        holder = self.holder
        if holder is None or not holder.is_with or holder.thread != threading.get_ident():
            raise RuntimeError("SlotPipeline.fork: not inside `with pipeline:`, expected to be")
        self._streams.fork()

    def _begin(self, holder: Turn) -> None:
        self._require_free()
        self.holder = holder
        self.is_captured = self._streams.enter()
        self.was_captured |= self.is_captured

    def _end_gone(self) -> None:
        """End what an exception in the middle of its end has left of a run of this thread."""
        for turn in (self._turn, self.holder):
            if turn is not None and turn.thread == threading.get_ident() and turn.is_gone():
                self.end_run(turn)

    def _require_free(self) -> None:
        holder = self.holder
        if holder is not None:
            if holder.thread != threading.get_ident():
                text = "in use by another thread; make a pipeline for each thread"
            elif self._turn is not None or not holder.is_with:
                text = (
                    "a run of it is not over; end it first, or use update() for both directions "
                    "at once, or a second pipeline"
                )
            else:
                text = "inside `with pipeline:` already; leave it first"
            raise RuntimeError(f"SlotPipeline: {text}")
        if self.is_closed:
            raise RuntimeError("SlotPipeline: the pipeline is closed; make another one")
