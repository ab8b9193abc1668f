"""The size of a cache: noted beside the entries, and kept below its cap by eviction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jitkern.cache.entry import EntryInfo
from jitkern.files import write_whole

_log = logging.getLogger("jitkern")


@dataclass(frozen=True)
class NotedBytes:
    """A file that notes the size of a cache, so that not every meta has to be read to know it.

    Two processes may lose an addition between them: it is a note, not an account.
    """

    path: Path

    def read(self) -> int | None:
        """Return the size in bytes, or None where none is noted."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, total_bytes: int) -> None:
        """Note `total_bytes`, best effort."""
        try:
            write_whole(self.path, str(total_bytes).encode())
        except OSError as error:
            _log.info("jitkern: cannot write %s: %s", self.path, error)


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
