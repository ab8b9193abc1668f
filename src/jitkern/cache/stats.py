"""Counts and times of what the loader did in this process, and who is told of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jitkern.env import settings
from jitkern.fs import ForkLocal

Source = Literal["memo", "cached", "shipped", "compiled"]

_log = logging.getLogger("jitkern")


@dataclass(frozen=True)
class Tally:
    """How often something happened, and the milliseconds it took in all."""

    count: int = 0
    total_ms: float = 0.0


@dataclass(frozen=True)
class Stats:
    """What :func:`jitkern.stats` returns.

    Attributes
    ----------
    memo, cached, shipped
        Lookups answered by this process's memory, by a cache folder, by the wheel.
    misses
        Lookups that found nothing.
    compiles, failures
        Compilations that succeeded; those that failed here or in the rank that was waited for.
    waits
        Waits for another thread or process that was compiling the same kernel.
    """

    memo: Tally = Tally()
    cached: Tally = Tally()
    shipped: Tally = Tally()
    misses: int = 0
    compiles: Tally = Tally()
    failures: int = 0
    waits: Tally = Tally()


class LookupEvent(NamedTuple):
    """What :func:`jitkern.on_compile` tells of one look-up.

    Attributes
    ----------
    name, args, arch
        The op or kernel, its template arguments, and such as ``9.0``; empty for C++.
    route
        ``device``, ``cuda`` (a single-source file) or ``cxx``.
    source
        ``compiled``; ``cached`` or ``shipped`` if a cache or the wheel had it; ``failed``.
    seconds
        How long it took, waiting for another process included.
    key, variant
        Where it is in a cache, as log lines name it; the variant of what failed may be empty.
    error
        The exception that is raised for a look-up that failed, else None.
    """

    name: str
    args: tuple[str, ...]
    arch: str
    route: str
    source: Source | Literal["failed"]
    seconds: float
    key: str
    variant: str
    error: Exception | None = None


Callback = Callable[[LookupEvent], object]

_guard = ForkLocal(threading.Lock)
_callbacks: dict[object, Callback] = {}
_tallies: dict[str, Tally] = {}


def count(what: str, ms: float = 0.0) -> None:
    """Add one occurrence of `what`, an attribute of Stats."""
    with _guard.value:
        so_far = _tallies.get(what, Tally())
        _tallies[what] = Tally(so_far.count + 1, so_far.total_ms + ms)


def stats() -> Stats:
    """Return counts and times of this process so far.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.stats().compiles.count
    0
    """
    with _guard.value:
        now: dict[str, Any] = dict(_tallies)
    counts = {name: now.pop(name, Tally()).count for name in ("misses", "failures")}
    return Stats(**now, **counts)


def on_compile(callback: Callback) -> Callable[[], None]:
    """Have `callback` told of each kernel or library that this process looks up.

    These are compiles, what a cache or the wheel had, and failures; not what is in memory.

    Parameters
    ----------
    callback
        Called with a :class:`LookupEvent`, in the thread that looks up. It must not load kernels
        itself. What it raises is logged with its traceback, and the look-up goes on.

    Returns
    -------
    callable
        Ends it; may be called more than once.

    Examples
    --------
    >>> import jitkern
    >>> stop = jitkern.on_compile(lambda event: print(event.name, event.source, event.seconds))
    >>> stop()
    """
    if not callable(callback):
        raise TypeError(
            f"on_compile: callback: {type(callback).__name__}, "
            "expected a function that takes a LookupEvent"
        )
    registration = object()
    _callbacks[registration] = callback

    def remove() -> None:
        _callbacks.pop(registration, None)

    return remove


def tell(event: LookupEvent) -> None:
    """Call what :func:`on_compile` has registered."""
    for callback in list(_callbacks.values()):
        try:
            callback(event)
        except Exception:
            _log.exception("jitkern: on_compile: %r failed; the look-up goes on", callback)


def log_lookup(key: object, source: Source, where: object, ms: float) -> None:
    """Log one look-up if JITKERN_LOG=1 asks for it."""
    if not settings().log:
        return
    if not _log.hasHandlers():  # the user asked for lines and configured no logging
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    _log.info("jitkern: %s: %s, %.2f ms%s", key, source, ms, f" ({where})" if where else "")
