"""Threads of communicators: a call with a timeout, and one that calls functions at intervals."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.25  # between two rounds of a Watch
_STOP_S = 2.0  # for a Watch to end with the interpreter


def call_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call it in a thread; raise TimeoutError if it takes longer, and leave it running."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name="jitkern-comm-call", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down
        run()
    wait([outcome], min(timeout_s, threading.TIMEOUT_MAX))
    if not outcome.done():
        raise TimeoutError(f"not over within {timeout_s:g} s")
    return outcome.result()


class Watch:
    """A daemon thread that calls functions four times a second, each until it returns False."""

    def __init__(self, name: str) -> None:
        self._looks: set[Callable[[], bool]] = set()
        self._is_over = threading.Event()
        self._starting = threading.Lock()  # ranks may be threads of one process
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` from now on."""
        self._looks.add(look)
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
                atexit.register(self._stop)

    def _stop(self) -> None:
        # An interpreter that ends while the thread is in a store's C++ code aborts.
        self._is_over.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for look in list(self._looks):
                with suppress(Exception):
                    if not look():
                        self._looks.discard(look)
