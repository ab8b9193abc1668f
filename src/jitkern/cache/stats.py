"""Counts of what the loader did in this process, and callbacks that hear of it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jitkern.cache.entry import Key
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.fs import ForkLocal

Source = Literal["memo", "cached", "shipped", "compiled"]

_log = logging.getLogger("jitkern")


@dataclass(frozen=True)
class Stats:
    """What ``stats`` returns: how often each of these happened.

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

    memo: int = 0
    cached: int = 0
    shipped: int = 0
    misses: int = 0
    compiles: int = 0
    failures: int = 0
    waits: int = 0


class LookupEvent(NamedTuple):
    """What ``on_compile`` tells of one look-up.

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
_counts: Counter[str] = Counter()


def count(what: str) -> None:
    """Add one occurrence of `what`, an attribute of Stats."""
    with _guard.value:
        _counts[what] += 1


def stats() -> Stats:
    """Return how often what has happened in this process so far.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.stats().compiles
    0
    """
    with _guard.value:
        return Stats(**_counts)


def on_compile(callback: Callback) -> Callable[[], None]:
    """Have `callback` told of each kernel or library that this process looks up.

    These are compiles, what a cache or the wheel had, and failures; not what is in memory.

    Parameters
    ----------
    callback
        Called with a ``LookupEvent``, in the thread that looks up. It must not load kernels
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
    registration = object()
    _callbacks[registration] = callback

    def remove() -> None:
        _callbacks.pop(registration, None)

    return remove


def tell(
    key: Key,
    source: Source | Literal["failed"],
    ms: float,
    variant: str,
    where: object = None,
    error: Exception | None = None,
) -> None:
    """Count one look-up, log it if JITKERN_LOG=1, and call what ``on_compile`` registered."""
    if source != "failed" or isinstance(error, CompileError):
        count({"compiled": "compiles", "failed": "failures"}.get(source, source))
    if settings().log and source != "failed":
        if not _log.hasHandlers():  # the user asked for lines and configured no logging
            _log.addHandler(logging.StreamHandler())
        if not _log.isEnabledFor(logging.INFO):
            _log.setLevel(logging.INFO)
        place = f" ({where})" if where else ""
        arch = f" for {key.arch}" if key.arch else ""
        _log.info("jitkern: %s/%s%s: %s, %.2f ms%s", key, variant, arch, source, ms, place)
    event = (key.op, key.args, key.arch, key.route, source, ms / 1e3, str(key), variant, error)
    for callback in list(_callbacks.values()):
        try:
            callback(LookupEvent(*event))
        except Exception:
            _log.exception("jitkern: on_compile: %r failed; the look-up goes on", callback)
