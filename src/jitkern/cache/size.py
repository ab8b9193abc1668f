"""Keeping a cache below its cap: the least recently used entries go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from jitkern.cache.cleanup import Found
from jitkern.errors import CacheError

_log = logging.getLogger("jitkern")

# Between two looks, so that they take 1 % of the time at most: 1,000 entries take 30 ms on a local
# disk, and seconds on a slow file server.
_LEAST_S = 1.0
_TIMES_THE_LOOK = 100.0

_SKEW_S = 60.0  # between machines that share a file server


class Fill:
    """How full a cache is, as far as this process knows: looked up now and then, added up between.

    What other processes publish between two looks is missing, and nobody's note is believed.
    """

    _bytes = 0
    _look_at_s = 0.0

    def after(self, new_bytes: int, look: Callable[[], int]) -> int:
        """Return the bytes of all entries, after one of `new_bytes` has been published.

        Parameters
        ----------
        look
            Sums up what is there.
        """
        start_s = time.monotonic()
        if start_s < self._look_at_s:
            self._bytes += new_bytes
            return self._bytes
        self._bytes = look()
        end_s = time.monotonic()
        self._look_at_s = end_s + max(_LEAST_S, _TIMES_THE_LOOK * (end_s - start_s))
        return self._bytes

    def is_now(self, total_bytes: int) -> None:
        """Take note of what an eviction has left."""
        self._bytes = total_bytes


def evict(
    entries: Iterable[Found], max_bytes: int, remove: Callable[[Found], None], keep: str
) -> tuple[int, int]:
    """Remove the least recently used entries until `max_bytes` remain.

    Returns
    -------
    (int, int)
        How many went, and the bytes that are left.
    """
    # A time of the future is that of a clock that was wrong: what has been used since has another.
    latest_s = time.time() + _SKEW_S
    by_age = sorted(
        entries, key=lambda found: (found.last_used_unix_s <= latest_s, found.last_used_unix_s)
    )
    total_bytes = sum(found.bytes for found in by_age)
    evicted = 0
    for found in by_age:
        if total_bytes <= max_bytes:
            break
        if str(found) == keep:
            continue
        try:
            remove(found)
        except (OSError, CacheError) as error:
            _log.info("jitkern: cannot evict %s: %s", found, error)
            continue
        total_bytes -= found.bytes
        evicted += 1
    return evicted, total_bytes
