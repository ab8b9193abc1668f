"""One cache folder: look up, publish, list, evict, clear.

Layout below the root, ``v1/``::

    <name>-<digest>/<variant>/{artefact, meta.json}    entries
    .staging/    entries being written or thrown away
    .locks/      one lock file per key that is being built

An entry appears by one atomic rename and is never written to again, so a reader sees all of it or
none. Every byte is checked on every read; what does not match counts as absent and gets replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from jitkern.cache.entry import META_NAME, Entry, Key, meta_bytes, read_entry, read_meta
from jitkern.cache.lock import build_lock
from jitkern.cache.trust import UntrustedError, check_folders
from jitkern.errors import CacheError
from jitkern.fs import flush_directory, is_abandoned, make_folders, private_name, write_new

# Results of rank(meta).
NO_USE = 0
USABLE = 1  # used only if nothing can be built
SHIPPED_WILL_DO = 2  # in a wheel it is as good as a build here
EXACT = 3  # what a build would make now

Rank = Callable[[Mapping[str, Any]], int]

_KEY = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]{0,79}-[0-9a-f]{20}\Z")
_TOUCH_EVERY_S = 60.0  # last use is kept to the minute: a warm start need not write at all

# A publication looks at so many keys and evicts so many entries: 12 and 20 ms on a local disk.
_MAX_MEASURED, _MAX_EVICTED = 256, 16

_log = logging.getLogger("jitkern")


class Cache:
    """A folder of entries; the first publication makes it."""

    def __init__(
        self,
        root: Path,  # it may be a link, to another disk say; what is below it may not
        *,
        read_only: bool = False,  # never write, not even the time of last use
        max_bytes: int | None = None,  # beyond it the least recently used entries go
        home: Path | None = None,  # no folder above this one is checked
        shared: bool = False,  # a wheel's, or made for other users: owner and mode do not count
    ) -> None:
        self.root: Path = Path(root)
        # Resolved once: a link that is changed later leads nowhere new.
        self.base: Path = Path(os.path.realpath(self.root / "v1"))
        self.read_only = read_only
        self.max_bytes = max_bytes
        self._home = home
        self._shared = shared
        self._folder_mode, self._file_mode = (0o755, 0o644) if shared else (0o700, 0o600)
        self._trusted_by = -1  # the user for whom check() has passed
        self._has_warned = False

    def check(self) -> bool:
        """Tell whether there is a cache here; UntrustedError if others could have written it."""
        user = os.geteuid()  # a server may change it when it has bound its port
        if self._trusted_by != user:
            if not self._shared and not check_folders(self.base, self._home):
                return False
            self._trusted_by = user
        return True

    def warn(self, message: str) -> None:
        """Warn, but once per process and cache."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"jitkern: {message}", RuntimeWarning, stacklevel=2)

    def lookup(self, key: Key, rank: Rank = lambda _: EXACT, least: int = USABLE) -> Entry | None:
        """Return the verified entry of `key` that ranks highest, the newest of equals; or None.

        An entry has to rank `least` or higher. Raises UntrustedError if others could have written
        the cache.
        """
        if not self.check():
            return None
        candidates = []
        folder = self.base / str(key)
        for name in _names(folder):
            with self._ignoring_damage():
                meta = read_meta(folder / name)
                candidates.append((rank(meta), meta.get("built_unix_s") or 0, name, meta))
        candidates.sort(key=lambda candidate: candidate[:3], reverse=True)
        for value, _, name, meta in candidates:
            path = folder / name
            with self._ignoring_damage():
                if value >= least:
                    entry = read_entry(path, meta)
                    self._touch(path / META_NAME)
                    return entry
        return None

    @contextmanager
    def _ignoring_damage(self) -> Iterator[None]:
        """Skip an entry that is missing or damaged."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, CacheError) as error:
            _log.info("jitkern: ignoring a damaged cache entry: %s", error)

    def _touch(self, meta: Path) -> None:
        with suppress(OSError):  # on a read-only disk the order of eviction stays as it is
            if not self.read_only and abs(time.time() - meta.stat().st_mtime) > _TOUCH_EVERY_S:
                os.utime(meta)

    def paths(self) -> list[Path]:
        """Return the paths of all entries, sound or not, by name."""
        return [self.base / key / name for key in self._keys() for name in _names(self.base / key)]

    def _keys(self) -> list[str]:
        return list(filter(_KEY.match, _names(self.base)))

    def entries(self) -> list[Entry]:
        """Return the readable entries by name, without their files."""
        entries = []
        for path in self.paths():
            with suppress(OSError, CacheError):
                entries.append(Entry(path, {}, read_meta(path)))
        return entries

    def lock(
        self, key: Key, *, timeout_s: float, done: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[bool]:
        """Hold the build lock of `key`; see ``cache.lock.build_lock``."""
        try:
            folder = self._make(".locks")
        except (OSError, UntrustedError):
            folder = Path(os.devnull)  # holds no files: no lock
        path = folder / f"{key}.lock"
        return build_lock(path, timeout_s=timeout_s, done=done, mode=self._file_mode)

    def _make(self, name: str) -> Path:
        """Make folder `name` below the base, and its parents, if they are missing."""
        self.check()  # nothing is made below a folder that others may write
        folder = self.base / name
        make_folders(folder, self._folder_mode)
        return folder

    def publish(self, entry: Entry) -> Entry:
        """Write a new entry, or one of another cache, to this cache; return it with its path.

        One of the same bytes stays, another is replaced. CacheError if nothing can be written.
        """
        if self.read_only:
            raise CacheError(f"{self.root}: this cache is read-only")
        target = self.base / str(entry.key) / entry.variant
        try:
            staging = self._make(".staging")
            _sweep(staging)
            staged = staging / private_name()
            try:
                make_folders(staged, self._folder_mode)
                for name, data in {**entry.files, META_NAME: meta_bytes(entry.meta)}.items():
                    write_new(staged / name, data, flush=True, mode=self._file_mode)
                flush_directory(staged)
                self._move_into_place(staged, target, entry)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        except OSError as error:
            path = error.filename or self.root
            raise CacheError(f"{path}: cannot publish an entry: {error.strerror}") from error
        if self.max_bytes is not None:
            self._evict(self.max_bytes, target)
        return entry._replace(path=target)

    def _move_into_place(self, staged: Path, target: Path, entry: Entry) -> None:
        while True:
            # Made anew in each round: other processes remove it whenever it is empty.
            with suppress(FileNotFoundError):
                self._make(target.parent.name)
            try:
                os.rename(staged, target)
                break
            except FileNotFoundError:
                if not staged.exists():
                    raise
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                with suppress(OSError, CacheError):
                    if read_entry(target).files == entry.files:
                        return  # another process was first
                # Damaged, or built with other system libraries: it did not load here.
                self._discard(target)
        with suppress(FileNotFoundError):  # another process has cleared the cache
            flush_directory(target.parent)
        flush_directory(self.base)

    def _discard(self, path: Path) -> None:
        """Move what is in the place of an entry to .staging by one rename, then delete it."""
        doomed = self._make(".staging") / private_name()
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(path, doomed)
            _delete(doomed)

    def _evict(self, max_bytes: int, keep: Path) -> None:
        """Evict the least recently used entries, a few at a time, if the cache is too large.

        If there are many keys, it estimates the size by a random sample.
        """
        import random

        keys = self._keys()
        # SystemRandom leaves the state of the user's generator alone.
        sampled = random.SystemRandom().sample(keys, min(len(keys), _MAX_MEASURED))
        measured: list[tuple[float, int, Path]] = []  # last use, size and path of each entry
        for key in sampled:
            _remove_if_empty(self.base / key)  # left by a process killed before its rename
            for variant in _names(self.base / key):
                path = self.base / key / variant
                with suppress(OSError), os.scandir(path) as items:
                    stats = {item.name: item.stat(follow_symlinks=False) for item in items}
                    last_used = stats[META_NAME].st_mtime if META_NAME in stats else 0.0
                    measured.append((last_used, sum(s.st_size for s in stats.values()), path))
        total_bytes = sum(size for _, size, _ in measured) * len(keys) // max(len(sampled), 1)
        if total_bytes <= max_bytes:
            return
        evicted = 0
        for _, size, path in sorted(measured):
            # Somewhat below the cap, so that the next publication need not evict again.
            if total_bytes <= max_bytes * 9 // 10 or evicted == _MAX_EVICTED:
                break
            with suppress(OSError):  # another process was faster
                if path != keep:
                    self._discard(path)
                    _remove_if_empty(path.parent)
                    total_bytes -= size
                    evicted += 1

    def clear(self) -> int:
        """Delete all entries, sound or not; return how many. Nothing else in the folder is touched.

        CacheError if others could have written the cache, or if it cannot be written.
        """
        if not self.check():
            return 0
        count = len(self.paths())
        try:
            for key in self._keys():
                self._discard(self.base / key)
            for name in _names(self.base / ".locks"):  # left by killed processes
                with build_lock(self.base / ".locks" / name, timeout_s=0, done=lambda: True):
                    pass  # deletes it, unless it is held
        except OSError as error:
            raise CacheError(f"{self.root}: cannot clear: {error.strerror}") from error
        return count


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it is a link, missing or not readable."""
    try:
        return [] if folder.is_symlink() else sorted(os.listdir(folder))
    except OSError:
        return []


def _sweep(staging: Path) -> None:
    """Delete what killed processes left under private names."""
    for name in _names(staging):
        with suppress(OSError):  # another process sweeps too
            if is_abandoned(name, time.time() - os.lstat(staging / name).st_mtime):
                _delete(staging / name)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        os.rmdir(folder)
