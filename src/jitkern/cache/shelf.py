"""One cache directory to look up in: what a call passes that finds what it needs.

Layout below the root, ``v1/``::

    <name>-<digest>/<variant>/{artefact, meta.json}    entries
    .staging/    directories being written or thrown away
    .locks/      one lock file per key, its holder beside it
    .failed/     the last failed build per key
    CACHEDIR.TAG  says that all of this is a cache of jitkern's

An entry appears by one atomic rename and is never written to again, so a reader sees all of it or
none. Every byte is checked on every read; whatever does not match is a miss and gets replaced.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jitkern.cache.entry import Entry, Key, OpenEntry, read_meta
from jitkern.cache.schema import META_NAME
from jitkern.cache.trust import Place, UntrustedError
from jitkern.env import NOBODY, Trust
from jitkern.errors import CacheError

T = TypeVar("T")

_log = logging.getLogger("jitkern")

_TOUCH_EVERY_S = 60.0  # last use is kept to the minute: a warm start need not write at all


class Shelf:
    """A directory of entries to look up in; :class:`jitkern.cache.store.Cache` does all else.

    Parameters
    ----------
    root
        The directory, whether it is there or not.
    read_only
        Never write, not even the time of last use.
    trust, home, shared
        See :class:`jitkern.cache.trust.Place`.
    """

    def __init__(
        self,
        root: Path,
        *,
        read_only: bool = False,
        trust: Trust = NOBODY,
        home: Path | None = None,
        shared: bool = False,
    ):
        self.root: Path = Path(root)
        self.place: Place = Place(self.root, trust, home, shared=shared)
        self.read_only = read_only

    @property
    def _base(self) -> Path:
        return self.place.base

    def lookup(
        self,
        key: Key,
        variant: str = "",
        accepts: Callable[[Mapping[str, Any]], bool] | None = None,
        prefers: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Entry | None:
        """Return a verified entry of `key`, or None.

        Parameters
        ----------
        variant
            Only this one; by default any, the newest build first: a name is anybody's choice.
        accepts
            Looks at an entry's meta and says whether it fits.
        prefers
            Says so of the ones that go before others, however old they are.

        Raises
        ------
        UntrustedError
            Others can have written what is in this cache. A single entry that others can have
            written is no entry, after a warning.
        """
        if not self.place.check():
            return None
        folder = self._base / key.directory
        for name in [variant] if variant else self._best_first(folder, prefers):
            entry = self._sound(self._read, folder / name, accepts)
            if entry is not None:
                self._touch(folder / name)
                return entry
        return None

    def _best_first(
        self, folder: Path, prefers: Callable[[Mapping[str, Any]], bool] | None
    ) -> list[str]:
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        if len(names) > 1:
            metas = {
                name: self._sound(read_meta, folder / name, self.place.trust) for name in names
            }

            def rank(name: str) -> tuple[bool, float, str]:
                meta = metas[name]
                if meta is None:
                    return False, 0.0, name
                return prefers is None or prefers(meta), _built_unix_s(meta), name

            names.sort(key=rank, reverse=True)
        return names

    def _read(
        self, path: Path, accepts: Callable[[Mapping[str, Any]], bool] | None
    ) -> Entry | None:
        with OpenEntry(path, self.place.trust) as opened:
            meta = opened.meta()
            return opened.entry(meta) if accepts is None or accepts(meta) else None

    def _sound(self, read: Callable[..., T], *args: Any) -> T | None:
        """Return what `read(*args)` does, or None for what is missing, damaged or not ours."""
        try:
            return read(*args)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UntrustedError as error:
            self.place.warn(f"this cache entry is not used: {error}")
        except (OSError, CacheError) as error:
            _log.info("jitkern: ignoring a damaged cache entry: %s", error)
        return None

    def _touch(self, path: Path) -> None:
        if self.read_only:
            return
        meta = path / META_NAME
        try:
            if abs(time.time() - meta.stat().st_mtime) > _TOUCH_EVERY_S:
                os.utime(meta)
        except OSError:
            pass  # best effort: a read-only cache keeps its old order of eviction


def _built_unix_s(meta: Mapping[str, Any]) -> float:
    return float(meta.get("built_unix_s") or 0.0)
