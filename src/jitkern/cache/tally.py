"""What ``jitkern.stats()`` returns; apart, for a first call does without it."""

from __future__ import annotations

from dataclasses import dataclass


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

    memo: Tally = Tally()
    cached: Tally = Tally()
    shipped: Tally = Tally()
    misses: int = 0
    compiles: Tally = Tally()
    failures: int = 0
    waits: Tally = Tally()
