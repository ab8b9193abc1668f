"""Counts and log lines of the look-ups of this process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from jitkern.cache.entry import Entry
from jitkern.env import settings
from jitkern.fs import ForkLocal

Source = Literal["memo", "cached", "shipped", "compiled"]

_log = logging.getLogger("jitkern")


@dataclass(frozen=True)
class KernelStats:
    """Counts of look-ups and builds, returned by ``stats``.

    Attributes
    ----------
    memo, cached, shipped
        Lookups answered by this process's memory, by a cache folder, by the wheel.
    misses
        Lookups that found nothing.
    compiles, failures
        Compilations that succeeded, and those that failed.
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


_guard = ForkLocal(threading.Lock)
_counts: Counter[str] = Counter()


def count(name: str) -> None:
    """Add one to the count `name`, an attribute of KernelStats."""
    with _guard.value:
        _counts[name] += 1


def stats() -> KernelStats:
    """Return the counts of this process so far."""
    with _guard.value:
        return KernelStats(**_counts)


def count_lookup(entry: Entry, source: Source, ms: float) -> None:
    """Count a look-up and log it; JITKERN_LOG=1 prints the line if no logging is configured."""
    count("compiles" if source == "compiled" else source)
    if settings().log:
        if not _log.hasHandlers():
            _log.addHandler(logging.StreamHandler())
        if not _log.isEnabledFor(logging.INFO):
            _log.setLevel(logging.INFO)
    arch = f" for {entry.key.arch}" if entry.key.arch else ""
    place = f" ({entry.path})" if entry.path else ""
    _log.info("jitkern: %s%s: %s, %.2f ms%s", entry, arch, source, ms, place)
