"""Waiting: polls with growing pauses, calls with a timeout, threads that look at intervals."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from jitkern.fs import ForkLocal

T = TypeVar("T")

_LOOK_S = 0.25  # the interval of a watch
_STOP_S = 2.0  # how long the end of the interpreter waits for a watch

_is_over = ForkLocal(threading.Event)
_watches: ForkLocal[weakref.WeakSet[threading.Thread]] = ForkLocal(weakref.WeakSet)


def polls(until: float) -> Iterator[bool]:
    """Yield False after growing pauses until ``time.monotonic()`` is `until`, then True."""
    pause_s = 0.0005
    while (left_s := until - time.monotonic()) > 0:
        yield False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.05)
    yield True


def call_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call `function` in a thread; TimeoutError if it takes longer: then it goes on running."""
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


def watch(name: str, look: Callable[[], bool]) -> None:
    """Call `look` four times a second, in a thread of its own, until it returns False."""

    def run() -> None:
        is_watched = True
        while is_watched and not _is_over.value.wait(_LOOK_S):
            with suppress(Exception):
                is_watched = look()

    thread = threading.Thread(target=run, name=f"jitkern-comm-{name}", daemon=True)
    thread.start()
    _watches.value.add(thread)
    atexit.unregister(_end_watches)  # registered last, so that it is called first
    atexit.register(_end_watches)


def _end_watches() -> None:
    """End the watches: the interpreter aborts if it ends while one is in a store's C++ code."""
    _is_over.value.set()
    for thread in list(_watches.value):
        thread.join(_STOP_S)
