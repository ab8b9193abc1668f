"""The thread that notices when a call of a communicator is not done in time."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from jitkern.forks import PerProcess

_SHORTEST_S = 0.01
_LONGEST_S = 1.0  # between two looks; a tenth of the shortest deadline if that is less


class Watched(Protocol):
    """What the thread looks after."""

    timeout_s: float

    def look(self) -> None:
        """End what has come to its deadline. It raises nothing."""


class _Watch:
    """One thread for all communicators of the process, from the first of them on."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, one: Watched) -> None:
        with self._changed:
            self._all.add(one)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="jitkern-comm-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def remove(self, one: Watched) -> None:
        with self._changed:
            self._all.discard(one)

    def _run(self) -> None:
        while True:
            with self._changed:
                every_s = min((one.timeout_s / 10 for one in self._all), default=None)
                if every_s is not None:
                    every_s = min(max(every_s, _SHORTEST_S), _LONGEST_S)
                self._changed.wait(every_s)  # for the next one, if there is none
                now = list(self._all)
            for one in now:
                one.look()
            del now[:]  # nothing is kept alive between two looks
            one = None  # type: ignore[assignment]


_watch = PerProcess(_Watch)


def watch(one: Watched) -> None:
    """Look after `one` from now on, for as long as it lives."""
    _watch.value.add(one)


def forget(one: Watched) -> None:
    """Look after it no longer."""
    _watch.value.remove(one)
