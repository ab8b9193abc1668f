"""Counts and times of what the loader did in this process, and one log line per lookup."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from jitkern.env import settings
from jitkern.fs import ForkLocal

if TYPE_CHECKING:
    from jitkern.cache.tally import Stats

Source = Literal["memo", "cached", "shipped", "compiled"]

_log = logging.getLogger("jitkern")


class LookupEvent(NamedTuple):
    """What :func:`jitkern.on_compile` tells of one look-up.

    Attributes
    ----------
    name, args
        The op or kernel, and its template arguments.
    arch
        Such as ``9.0``; empty for C++.
    route
        ``device``, ``cuda`` (a single-source file) or ``cxx``.
    source
        ``compiled``; ``cached`` or ``shipped`` where a cache or the wheel had it; ``failed``.
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
# Each in a list of its own, whose identity is that of the registration.
_callbacks: tuple[list[Callback], ...] = ()
# Of each attribute of Stats, how often and the milliseconds in all.
_tallies: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))


def count(what: str, ms: float = 0.0) -> None:
    """Add one occurrence of `what`, an attribute of Stats."""
    with _guard.value:
        times, total_ms = _tallies[what]
        _tallies[what] = (times + 1, total_ms + ms)


def stats() -> Stats:
    """Return counts and times of this process so far.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.stats().compiles.count
    0
    """
    from jitkern.cache.tally import Stats, Tally

    with _guard.value:
        now = defaultdict(Tally, {what: Tally(*tally) for what, tally in _tallies.items()})
    return Stats(
        memo=now["memo"],
        cached=now["cached"],
        shipped=now["shipped"],
        misses=now["misses"].count,
        compiles=now["compiles"],
        failures=now["failures"].count,
        waits=now["waits"],
    )


def on_compile(callback: Callback) -> Callable[[], None]:
    """Have `callback` told of each kernel or library that this process looks up.

    That is every compile, every one found in a cache or in the wheel, and every failure, but not
    what this process has in memory. For a server's log and metrics.

    Parameters
    ----------
    callback
        Called with a :class:`LookupEvent`, in the thread that looks up, before its call goes on.
        It must not load kernels itself. What it raises goes to the logger ``jitkern`` as an error
        with its traceback, and the look-up goes on.

    Returns
    -------
    callable
        Ends it; may be called more than once.

    Raises
    ------
    TypeError
        `callback` cannot be called.

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
    global _callbacks
    registered = [callback]
    with _guard.value:
        _callbacks = (*_callbacks, registered)

    def remove() -> None:
        global _callbacks
        with _guard.value:
            _callbacks = tuple(one for one in _callbacks if one is not registered)

    return remove


def is_watched() -> bool:
    """Tell whether there is anybody to tell of a look-up."""
    return bool(_callbacks)


def tell(event: LookupEvent) -> None:
    """Call what :func:`on_compile` has registered."""
    for (callback,) in _callbacks:
        try:
            callback(event)
        except Exception:
            _log.exception("jitkern: on_compile: %r failed; the look-up goes on", callback)


def log_lookup(key: object, source: Source, where: object, ms: float) -> None:
    """Log one lookup where JITKERN_LOG=1 asks for it."""
    if not settings().log:
        return
    if not _log.hasHandlers():
        # The user asked for lines and configured no logging: standard error it is.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    _log.info("jitkern: %s: %s, %.2f ms%s", key, source, ms, f" ({where})" if where else "")
