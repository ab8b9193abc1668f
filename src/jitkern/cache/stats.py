"""Counts and times of what the loader did in this process, and one log line per lookup."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import Literal

from jitkern.env import settings

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


_guard = threading.Lock()
_tallies: dict[str, Tally] = {}


def _renew_guard() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew_guard)


def count(what: str, ms: float = 0.0) -> None:
    """Add one occurrence of `what`, an attribute of Stats."""
    with _guard:
        _tallies[what] = _tallies.get(what, Tally()).plus(ms)


def stats() -> Stats:
    """Return counts and times of this process so far.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.stats().compiles.count
    0
    """
    with _guard:
        now = dict(_tallies)
    return Stats(
        memo=now.get("memo", Tally()),
        cached=now.get("cached", Tally()),
        shipped=now.get("shipped", Tally()),
        misses=now.get("misses", Tally()).count,
        compiles=now.get("compiles", Tally()),
        failures=now.get("failures", Tally()).count,
        waits=now.get("waits", Tally()),
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
