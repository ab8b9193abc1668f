"""The cache of compiled artefacts: look up, publish, lock, list, prune, export, import.

Layout below the root, ``v1/``::

    <name>-<family>/<toolchain>/{artefact, meta.json}    entries
    .staging/    directories being written or thrown away
    .locks/      one lock file per key, its holder beside it
    .failed/     the last failed build per key
    .bytes       the size of all entries, roughly

An entry appears by one atomic rename and is never written to again, so a reader sees all of it or
none. Every byte is checked on every read; whatever does not match is a miss and gets replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.cache import bundle, failures
from jitkern.cache.entry import (
    META_NAME,
    Entry,
    Key,
    flush_directory,
    read_entry,
    read_meta,
    render_meta,
    write_entry,
)
from jitkern.cache.lock import Wait, build_lock
from jitkern.cache.size import NotedBytes, private_name, remove_if_empty, sweep
from jitkern.errors import CacheError
from jitkern.names import is_safe_name

_log = logging.getLogger("jitkern")

_TOUCH_EVERY_S = 60.0  # last use is kept to the minute: a warm start need not write at all
_PUBLISHES_PER_SCAN = 64


@dataclass(frozen=True)
class EntryInfo:
    """One line of ``jitkern cache list``."""

    name: str
    args: str
    arch: str
    route: str
    toolchain: str
    bytes: int
    last_used: float
    path: Path


class Cache:
    """A directory of entries.

    Parameters
    ----------
    root
        The directory; it is made by the first publish.
    read_only
        Never write, not even the time of last use.
    max_bytes
        Publishing beyond this evicts the least recently used entries.
    """

    def __init__(self, root: Path, *, read_only: bool = False, max_bytes: int | None = None):
        self.root = Path(root)
        self.read_only = read_only
        self.max_bytes = max_bytes
        self._base = self.root / "v1"
        self._publishes = 0
        self._noted_bytes = NotedBytes(self._base / ".bytes")

    def __repr__(self) -> str:
        return f"Cache({str(self.root)!r}, read_only={self.read_only})"

    # -- reading ---------------------------------------------------------------------------------

    def lookup(
        self, key: Key, accept: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> Entry | None:
        """Return the verified entry of `key`, or None.

        Parameters
        ----------
        key
            With an empty toolchain, an entry of any toolchain is good.
        accept
            Looks at the meta of each entry of the family and says whether it fits; by default the
            toolchain must be the key's.
        """
        family = self._base / key.directory
        if key.toolchain and accept is None:
            names: Iterable[str] = (key.toolchain,)
        else:
            try:
                names = sorted(os.listdir(family), reverse=True)
            except OSError:
                return None
        for name in names:
            path = family / name
            try:
                if accept is not None and not accept(read_meta(path)):
                    continue
                entry = read_entry(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, CacheError) as error:
                _log.info("jitkern: ignoring a damaged cache entry: %s", error)
                continue
            self._touch(path)
            return entry
        return None

    def _touch(self, path: Path) -> None:
        if self.read_only:
            return
        meta = path / META_NAME
        try:
            if time.time() - meta.stat().st_mtime > _TOUCH_EVERY_S:
                os.utime(meta)
        except OSError:
            pass  # best effort: a read-only cache keeps its old order of eviction

    def entries(self) -> list[EntryInfo]:
        """List the readable entries, by name."""
        return [info for _, info in self._scan()]

    def _scan(self) -> Iterator[tuple[Path, EntryInfo]]:
        for path in sorted(self._base.glob("[!.]*/*")):
            try:
                meta = read_meta(path)
                used = (path / META_NAME).stat()
            except (OSError, CacheError):
                continue
            describe = meta["describe"]
            size = used.st_size + sum(file["bytes"] for file in meta["files"].values())
            args = describe.get("args", "")
            yield (
                path,
                EntryInfo(
                    name=str(describe.get("op", meta["name"])),
                    args=args if isinstance(args, str) else ", ".join(map(str, args)),
                    arch=str(describe.get("arch", "")),
                    route=str(meta["route"]),
                    toolchain=str(meta["toolchain"]),
                    bytes=size,
                    last_used=used.st_mtime,
                    path=path,
                ),
            )

    def verify(self) -> list[str]:
        """Check every entry's checksums; return one line per damaged entry."""
        problems = []
        for path in sorted(self._base.glob("[!.]*/*")):
            try:
                read_entry(path)
            except (OSError, CacheError) as error:
                problems.append(str(error))
        return problems

    # -- writing ---------------------------------------------------------------------------------

    def lock(
        self, key: Key, *, timeout_s: float, poll: Callable[[], bool] = lambda: False
    ) -> AbstractContextManager[Wait]:
        """Hold the build lock of `key`; see :func:`jitkern.cache.lock.build_lock`."""
        return build_lock(self._side_file(".locks", key, ".lock"), timeout_s=timeout_s, poll=poll)

    def failure(self, key: Key) -> failures.FailureRecord:
        """Return the place where the last failed build of `key` is kept."""
        return failures.FailureRecord(self._side_file(".failed", key, ".json"))

    def _side_file(self, folder: str, key: Key, suffix: str) -> Path:
        return self._base / folder / f"{key.directory}-{key.toolchain or 'any'}{suffix}"

    def publish(
        self,
        key: Key,
        files: Mapping[str, bytes],
        meta: Mapping[str, Any] | None = None,
        verify: Callable[[Path], None] | None = None,
    ) -> Entry:
        """Make `files` the entry of `key`; the first file is the artefact.

        Where another process was first its entry stays, and the returned entry still holds the
        caller's own bytes.

        Parameters
        ----------
        verify
            Called with the staging directory before the entry can be seen; whatever it raises
            prevents the publication.

        Raises
        ------
        CacheError
            The directory cannot be written; nothing half-written is left behind.
        """
        if self.read_only:
            raise CacheError(f"{self.root}: this cache is read-only")
        if not is_safe_name(key.toolchain):
            raise ValueError(f"publish: toolchain: {key.toolchain!r}, expected a plain name")
        body = render_meta(key, files, meta or {})
        target = self._base / key.directory / key.toolchain
        try:
            staged = self._make_staging()
            try:
                write_entry(staged, files, body)
                if verify is not None:
                    verify(staged)
                self._move_into_place(staged, target)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CacheError(f"{self.root}: cannot publish an entry: {reason}") from error
        self.failure(key).forget()
        self._evict_beyond_cap(target, sum(map(len, files.values())))
        return Entry(target, dict(files), body)

    def _make_staging(self) -> Path:
        folder = self._base / ".staging"
        folder.mkdir(parents=True, exist_ok=True)
        if self._publishes == 0:
            sweep(folder)
        self._publishes += 1
        path = folder / private_name()
        path.mkdir()
        return path

    def _move_into_place(self, staged: Path, target: Path) -> None:
        while True:
            # Made anew in each round: eviction may have removed the empty family directory.
            target.parent.mkdir(exist_ok=True)
            try:
                os.rename(staged, target)
                break
            except FileNotFoundError:
                if not staged.exists():
                    raise
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                try:
                    read_entry(target)
                    return  # another process was first and its entry is sound
                except (OSError, CacheError):
                    self._discard(target)
        flush_directory(target.parent)
        flush_directory(self._base)

    def _discard(self, path: Path) -> None:
        """Take `path` out of sight in one step, then delete it."""
        doomed = self._base / ".staging"
        doomed.mkdir(parents=True, exist_ok=True)
        doomed /= private_name()
        try:
            os.rename(path, doomed)
        except FileNotFoundError:
            return  # another process was faster
        if doomed.is_dir():
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            doomed.unlink(missing_ok=True)

    # -- size ------------------------------------------------------------------------------------

    def _evict_beyond_cap(self, published: Path, new_bytes: int) -> None:
        if self.max_bytes is None:
            return
        # Noted, since reading every meta would take 0.1 s for a thousand entries.
        total = self._noted_bytes.read()
        if total is None or self._publishes % _PUBLISHES_PER_SCAN == 0:
            total = sum(info.bytes for _, info in self._scan())
        else:
            total += new_bytes
        if total > self.max_bytes:
            # Somewhat below the cap, so that the next publication need not evict again.
            self.prune(self.max_bytes * 9 // 10, keep=published)
        else:
            self._noted_bytes.write(total)

    def prune(self, max_bytes: int, *, keep: Path | None = None) -> int:
        """Evict least recently used entries until `max_bytes` remain; return how many went.

        `keep` is an entry that stays whatever its age.
        """
        found = sorted(self._scan(), key=lambda item: item[1].last_used)
        total = sum(info.bytes for _, info in found)
        evicted = 0
        for path, info in found:
            if total <= max_bytes:
                break
            if path == keep:
                continue
            try:
                self._discard(path)
                remove_if_empty(path.parent)
            except OSError as error:
                _log.info("jitkern: cannot evict %s: %s", path, error)
                continue
            total -= info.bytes
            evicted += 1
        if not self.read_only:
            self._noted_bytes.write(total)
        return evicted

    def clear(self) -> int:
        """Remove every entry, damaged ones too; return how many.

        Raises
        ------
        CacheError
            The directory cannot be written.
        """
        removed = 0
        try:
            for path in sorted(self._base.glob("[!.]*/*")):
                self._discard(path)
                remove_if_empty(path.parent)
                removed += 1
            if removed:
                self._noted_bytes.write(0)
        except OSError as error:
            raise CacheError(f"{self.root}: cannot clear: {error.strerror}") from error
        shutil.rmtree(self._base / ".failed", ignore_errors=True)
        return removed

    # -- bundles ---------------------------------------------------------------------------------

    def export_bundle(self, file: Path, select: Callable[[EntryInfo], bool] | None = None) -> int:
        """Write the sound entries that `select` accepts into one file; return how many.

        The same entries give the same file, byte for byte.
        """
        members: dict[str, bytes] = {}
        count = 0
        for path, info in self._scan():
            if select is not None and not select(info):
                continue
            try:
                entry = read_entry(path)
                meta = (path / META_NAME).read_bytes()
            except (OSError, CacheError):
                continue
            folder = path.relative_to(self._base).as_posix()
            members[f"{folder}/{META_NAME}"] = meta
            members.update({f"{folder}/{name}": data for name, data in entry.files.items()})
            count += 1
        bundle.write(Path(file), members)
        return count

    def import_bundle(self, file: Path) -> int:
        """Publish every entry of a bundle; return how many.

        Everything is verified first: a damaged bundle changes nothing.

        Raises
        ------
        CacheError
            The file is damaged, or this cache cannot be written.
        """
        entries = bundle.read_entries(Path(file))
        for key, files, meta in entries:
            self.publish(key, files, meta)
        return len(entries)


def verify_bundle(file: Path) -> int:
    """Check every entry of a bundle; return how many there are.

    Raises
    ------
    CacheError
        Something is damaged.
    """
    return len(bundle.read_entries(Path(file)))
