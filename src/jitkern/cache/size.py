"""Keeping a cache below its cap: the least recently used entries go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from jitkern.cache.entry import EntryInfo

_log = logging.getLogger("jitkern")


def evict(
    entries: Iterable[EntryInfo],
    max_bytes: int,
    discard: Callable[[Path], None],
    keep: Path | None,
) -> tuple[int, int]:
    """Discard the least recently used entries until `max_bytes` remain.

    Returns
    -------
    (int, int)
        How many went, and the bytes that are left.
    """
    by_age = sorted(entries, key=lambda info: info.last_used)
    total_bytes = sum(info.bytes for info in by_age)
    evicted = 0
    for info in by_age:
        if total_bytes <= max_bytes:
            break
        if info.path == keep:
            continue
        try:
            discard(info.path)
        except OSError as error:
            _log.info("jitkern: cannot evict %s: %s", info.path, error)
            continue
        total_bytes -= info.bytes
        evicted += 1
    return evicted, total_bytes
