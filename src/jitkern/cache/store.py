"""A cache directory: list, publish, evict, clear; ``shelf`` is its layout, and looks up."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.cache import cleanup
from jitkern.cache.entry import Entry, Key, key_of, read_entry, read_meta
from jitkern.cache.schema import META_NAME
from jitkern.cache.shelf import Shelf
from jitkern.cache.size import Fill, evict
from jitkern.cache.trust import UntrustedError
from jitkern.cache.write import render_meta, write_entry
from jitkern.env import NOBODY, Trust
from jitkern.errors import CacheError
from jitkern.fs import flush_directory, private_name, set_mode

if TYPE_CHECKING:
    from jitkern.cache.lock import FailureRecord, Wait

_log = logging.getLogger("jitkern")


class EntryInfo(NamedTuple):
    """One line of a listing."""

    name: str
    args: str
    arch: str
    route: str
    variant: str
    bytes: int
    last_used: float
    path: Path

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


class Cache(Shelf):
    """A directory of entries: looked up in, listed and written.

    Parameters
    ----------
    root
        The directory; it is made by the first publish.
    max_bytes
        Publishing beyond this evicts the least recently used entries.
    read_only, trust, home, shared
        See :class:`jitkern.cache.shelf.Shelf`.
    """

    def __init__(
        self,
        root: Path,
        *,
        read_only: bool = False,
        max_bytes: int | None = None,
        trust: Trust = NOBODY,
        home: Path | None = None,
        shared: bool = False,
    ):
        super().__init__(root, read_only=read_only, trust=trust, home=home, shared=shared)
        self.max_bytes = max_bytes
        self._fill = Fill()
        self._is_swept = False

    @classmethod
    def of(cls, shelf: Shelf, max_bytes: int | None) -> Cache:
        """Return the whole of what a process has looked up in, of the same place."""
        cache = cls(shelf.root, read_only=shelf.read_only, max_bytes=max_bytes)
        cache.place = shelf.place  # what has been looked at and warned of stays so
        return cache

    # -- listing ---------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """List the readable entries, by name."""
        found = []
        for path in self._paths():
            try:
                found.append(_info(path))
            except (OSError, CacheError):
                continue
        return found

    def verify(self) -> list[str]:
        """Check every entry's checksums; return one line per damaged entry."""
        problems = []
        for path in self._paths():
            try:
                read_entry(path)
            except CacheError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{error.filename or path}: {error.strerror}")
        return problems

    def _paths(self) -> list[Path]:
        return [self._path(found) for found in self._survey()]

    def _path(self, found: cleanup.Found) -> Path:
        return self._base / found.key / found.variant

    def _survey(self) -> list[cleanup.Found]:
        try:
            with self._opened() as base:
                return list(cleanup.survey(base))
        except OSError:
            return []  # not made yet, or closed to us

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Hold the descriptor of `v1`: the root may be a link to another disk, `v1` may not."""
        with cleanup.opened(self._base.parent) as root, cleanup.opened("v1", root) as base:
            yield base

    # -- writing ---------------------------------------------------------------------------------

    def lock(
        self, key: Key, *, timeout_s: float, done: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[Wait]:
        """Hold the build lock of `key`; see :func:`jitkern.cache.lock.build_lock`."""
        # Imported here: a look-up has no need of it, and it takes 1 to 2 ms.
        from jitkern.cache.lock import build_lock

        with suppress(OSError, CacheError):  # read-only or full, say: it is built without the lock
            self.place.make(cleanup.LOCKS)
        path = self._beside(cleanup.LOCKS) / f"{key.directory}.lock"
        return build_lock(path, timeout_s=timeout_s, done=done, mode=self.place.mode & 0o666)

    def failure(self, key: Key) -> FailureRecord:
        """Return the record of the last failed build of `key`."""
        from jitkern.cache.lock import FailureRecord

        return FailureRecord(self._beside(cleanup.FAILED) / f"{key.directory}.json")

    def _beside(self, name: str) -> Path:
        """Directory `name` beside the entries; nowhere, if others could write to it."""
        try:
            return self.place.folder(name)
        except (OSError, UntrustedError):
            return Path(os.devnull)

    def publish(
        self,
        key: Key,
        variant: str,
        files: Mapping[str, bytes],
        notes: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Make `files` the entry of `key` and `variant`; the first file is the artefact.

        Where another process was first its entry stays, and the returned entry still holds the
        caller's own bytes.

        Raises
        ------
        CacheError
            The directory cannot be written; nothing half-written is left behind.
        """
        with self.stage(key, variant, files, notes) as staged:
            return self.commit(staged)

    @contextmanager
    def stage(
        self,
        key: Key,
        variant: str,
        files: Mapping[str, bytes],
        notes: Mapping[str, Any] | None = None,
    ) -> Iterator[Entry]:
        """Write an entry where nobody looks, to be tried before it is committed.

        What has not been committed at the end of the body is gone. Raises as :meth:`publish`.
        """
        if self.read_only:
            raise CacheError(f"{self.root}: this cache is read-only")
        meta = render_meta(key, variant, files, notes or {})
        with self._writing():
            path = self._new_staging()
        try:
            with self._writing():
                write_entry(path, files, meta, self.place.file_mode)
            yield Entry(path, dict(files), meta)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, staged: Entry) -> Entry:
        """Move a staged entry to its place by one rename. Raises as :meth:`publish`."""
        if staged.path is None:
            raise ValueError("commit: staged: not an entry of stage()")
        target = self._base / staged.key.directory / staged.variant
        with self._writing():
            self._move_into_place(staged.path, target)
        self.failure(staged.key).forget()
        self._evict_beyond_cap(target, sum(map(len, staged.files.values())))
        return Entry(target, staged.files, staged.meta)

    def copy(self, entry: Entry) -> Entry:
        """Publish an entry of another cache as it is. Raises as :meth:`publish`."""
        files = {entry.artefact_name: entry.data, **entry.files}
        return self.publish(entry.key, entry.variant, files, entry.notes)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise CacheError(f"{self.root}: cannot publish an entry: {reason}") from error

    def _new_staging(self) -> Path:
        path = self.place.make(cleanup.STAGING) / private_name()
        if not self._is_swept:
            self._is_swept = True
            cleanup.tag(self._base, self.place.file_mode)
            with self._opened() as base:
                cleanup.sweep(base)
        # Not through a link in the place of the folder.
        with self._opened() as base, cleanup.opened(cleanup.STAGING, base) as staging:
            os.mkdir(path.name, 0o700, dir_fd=staging)
        set_mode(path, self.place.mode)
        return path

    def _move_into_place(self, staged: Path, target: Path) -> None:
        while True:
            # Made anew in each round: eviction may have removed it when it was empty.
            self.place.make(target.parent.name)
            try:
                with self._opened() as base, cleanup.opened(target.parent.name, base) as folder:
                    os.rename(staged, target.name, dst_dir_fd=folder)
                break
            except FileNotFoundError:
                if not staged.exists():
                    raise
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                try:
                    read_entry(target, trust=self.place.trust)
                    return  # another process was first and its entry is sound
                except (OSError, CacheError):
                    with self._opened() as base:
                        cleanup.discard(base, target.parent.name, target.name)
        flush_directory(target.parent)
        flush_directory(self._base)

    # -- size ------------------------------------------------------------------------------------

    def _evict_beyond_cap(self, published: Path, new_bytes: int) -> None:
        if self.max_bytes is None:
            return
        if self._fill.after(new_bytes, self._total_bytes) > self.max_bytes:
            # Somewhat below the cap, so that the next publication need not evict again.
            self.prune(self.max_bytes * 9 // 10, keep=published)

    def _total_bytes(self) -> int:
        return sum(found.bytes for found in self._survey())

    def prune(self, max_bytes: int, *, keep: Path | None = None) -> int:
        """Evict least recently used entries until `max_bytes` remain; return how many went.

        `keep` is an entry that stays whatever its age.
        """
        kept = "" if keep is None else f"{keep.parent.name}/{keep.name}"
        try:
            with self._opened() as base:
                remove = partial(cleanup.remove, base)
                evicted, left_bytes = evict(cleanup.survey(base), max_bytes, remove, kept)
        except OSError as error:
            _log.info("jitkern: cannot evict from %s: %s", self.root, error)
            return 0
        self._fill.is_now(left_bytes)
        return evicted

    def beyond(self, max_bytes: int) -> list[str]:
        """Name what :meth:`prune` would evict, as ``key/variant``."""
        going: list[cleanup.Found] = []
        evict(self._survey(), max_bytes, going.append, keep="")
        return list(map(str, going))

    def clear(
        self, *, only: Container[str] | None = None, dry_run: bool = False
    ) -> cleanup.Cleared:
        """Remove every entry, damaged ones too; what jitkern has not written stays.

        Parameters
        ----------
        only
            Which entries, by ``key/variant``.
        dry_run
            Only say what would be removed.

        Raises
        ------
        CacheError
            The directory is not marked as a cache of jitkern's, or cannot be written.
        """
        if not os.path.lexists(self._base):
            return cleanup.Cleared([], [])
        try:
            with self._opened() as base:
                return cleanup.clear(base, self._base, only=only, dry_run=dry_run)
        except OSError as error:
            raise CacheError(f"{self.root}: cannot clear: {error.strerror}") from error


def _info(path: Path) -> EntryInfo:
    """Read what a listing shows of the entry at `path`. Raises as :func:`read_meta`."""
    meta = read_meta(path)
    used = (path / META_NAME).stat()
    key = key_of(meta)
    return EntryInfo(
        name=key.op,
        args=", ".join(key.args),
        arch=key.arch,
        route=key.route,
        variant=meta["toolchain"],
        bytes=used.st_size + sum(file["bytes"] for file in meta["files"].values()),
        last_used=used.st_mtime,
        path=path,
    )
