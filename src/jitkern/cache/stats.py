"""Counts and times of what the loader did in this process, and one log line per lookup."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from jitkern.env import settings
from jitkern.forks import PerProcess

Source = Literal["memo", "cached", "shipped", "compiled"]

_log = logging.getLogger("jitkern")


@dataclass(frozen=True)
class Tally:
    """How often something happened, and the milliseconds it took in all."""

    count: int = 0
    total_ms: float = 0.0

    def plus(self, ms: float) -> Tally:
        """Return this tally with one more occurrence of `ms` milliseconds."""
        return Tally(self.count + 1, self.total_ms + ms)


@dataclass(frozen=True)
class Stats:
    """What :func:`jitkern.stats` returns.

    Attributes
    ----------
    memo, cached, shipped
        Lookups answered by this process's memory, by a cache directory, by the wheel.
    misses
        Lookups that found nothing.
    compiles
        Compilations that succeeded, with their time.
    failures
        Compilations that failed here or were reported by another rank.
    waits
        Waits for another thread or process that was compiling the same kernel.
    """

    memo: Tally = field(default_factory=Tally)
    cached: Tally = field(default_factory=Tally)
    shipped: Tally = field(default_factory=Tally)
    misses: int = 0
    compiles: Tally = field(default_factory=Tally)
    failures: int = 0
    waits: Tally = field(default_factory=Tally)


_guard = PerProcess(threading.Lock)
_tallies: defaultdict[str, Tally] = defaultdict(Tally)


def count(what: str, ms: float = 0.0) -> None:
    """Add one occurrence of `what`, an attribute of Stats."""
    with _guard.value:
        _tallies[what] = _tallies[what].plus(ms)


def stats() -> Stats:
    """Return counts and times of this process so far.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.stats().compiles.count
    0
    """
    with _guard.value:
        now = _tallies.copy()
    return Stats(
        memo=now["memo"],
        cached=now["cached"],
        shipped=now["shipped"],
        misses=now["misses"].count,
        compiles=now["compiles"],
        failures=now["failures"].count,
        waits=now["waits"],
    )


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
