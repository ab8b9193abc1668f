"""Bundles: any number of cache entries in one file, to be carried to machines with no compiler.

A bundle is a gzipped tar of ``<name>-<digest>/<variant>/<file>``. The same entries give the same
bytes; everything is verified before anything is used. That finds damage; what a bundle brings is
code, and whoever wrote the file has written the code.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.cache.cleanup import opened, survey
from jitkern.cache.entry import Entry, read_entry, read_meta
from jitkern.cache.schema import META_MAX_BYTES, META_NAME, check_file, parse_meta
from jitkern.cache.store import Cache, EntryInfo
from jitkern.cache.strangers import written_by_others
from jitkern.errors import CacheError
from jitkern.fs import is_safe_name, open_regular, read_regular, write_whole

MAX_UNPACKED_BYTES = 1 << 30
"""What a bundle may unpack to, unless more is allowed; 384 kernels of jitkern's own have 6 MB."""

_MAX_SAID = 5  # entries that are named one by one

_MAX_FILES = 100_000  # a file costs 1.5 KB of memory before its first byte

# What gzip and tarfile raise for damage, some of it undocumented: a chain of long names recurses.
_DAMAGE = (
    *(tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error),
    *(ValueError, LookupError, OverflowError, RecursionError),
)


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been read: verified entries, which live in memory only.

    Attributes
    ----------
    file, entries
        Where it was, and what is in it.
    status
        The fstat of the very file that was read.
    """

    file: Path
    entries: list[Entry]
    status: os.stat_result

    def require_trusted(self) -> None:
        """Raise CacheError where others could have written the file."""
        reason = written_by_others(self.file, self.status)
        if reason:
            command = f"jitkern cache import --trust {self.file}"
            raise CacheError(f"{self.file}: {reason}; if you trust them, import it with: {command}")


def export_bundle(
    cache: Cache, file: Path, select: Callable[[EntryInfo], bool] = lambda _: True
) -> int:
    """Write the entries of `cache` that `select` accepts into one file; return how many.

    The same entries give the same file, byte for byte. What others can have written is never in
    it: the file is this user's own, and would make it trusted.

    Raises
    ------
    CacheError
        The file cannot be written; others can have written what is in the cache; or an entry that
        is chosen is damaged, or one says no more what it was. Nothing is written then: whoever
        carries the file to a machine with no compiler would miss a kernel there.
    """
    cache.place.check()
    members: dict[str, bytes] = {}
    listed = cache.entries()
    chosen = list(filter(select, listed))
    problems = _unreadable(cache, set(map(str, listed)))
    for info in chosen:
        try:
            entry = read_entry(info.path, cache.place.trust)
            meta = read_regular(info.path / META_NAME, META_MAX_BYTES)
        except (OSError, CacheError) as error:
            problems.append(_why(info.path, error))
            continue
        members[f"{info}/{META_NAME}"] = meta
        members.update({f"{info}/{name}": data for name, data in entry.files.items()})
    if problems:
        more = len(problems) - _MAX_SAID
        said = "; ".join(problems[:_MAX_SAID]) + (f"; and {more} more" if more > 0 else "")
        raise CacheError(
            f"{cache.root}: nothing exported, {len(problems)} damaged or not trusted: {said}; a "
            "call builds anew what it needs of them, and what none needs can be deleted"
        )
    try:
        write_whole(file, _packed(members), flush=True)
    except OSError as error:
        raise CacheError(f"{file}: cannot write the bundle: {error.strerror}") from error
    return len(chosen)


def _unreadable(cache: Cache, listed: Container[str]) -> list[str]:
    """Say why entries are none: nobody can tell whether they are chosen."""
    problems = []
    base = cache.place.base
    with suppress(FileNotFoundError, NotADirectoryError), opened(base) as descriptor:
        for found in survey(descriptor):
            path = base / str(found)
            if str(found) in listed:
                continue
            try:
                read_meta(path)
            except (OSError, CacheError) as error:
                if os.path.isdir(path):  # else it was evicted meanwhile
                    problems.append(_why(path / META_NAME, error))
    return problems


def _why(path: Path, error: OSError | CacheError) -> str:
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)


def import_bundle(
    cache: Cache,
    file: Path,
    *,
    trust: bool = False,
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES,
    show: Callable[[Bundle], None] = lambda _: None,
) -> int:
    """Publish every entry of a bundle in `cache`; return how many.

    Everything is verified first: a damaged bundle changes nothing. What it brings is code, which
    runs in every process that loads it: import only what you would install.

    Parameters
    ----------
    trust
        Import even what other users could have written.
    max_unpacked_bytes
        As for :func:`read_bundle`.
    show
        Called with what has been read, before it is refused or published.

    Raises
    ------
    CacheError
        The file is damaged, somebody else's, or the cache cannot be written.
    """
    bundle = read_bundle(file, max_unpacked_bytes=max_unpacked_bytes)
    show(bundle)
    if not trust:
        bundle.require_trusted()
    return len([cache.copy(entry) for entry in bundle.entries])


def copy_entries(paths: Iterable[Path], cache: Cache) -> int:
    """Publish the entries at `paths` in `cache`; return how many. CacheError for a damaged one."""
    return len([cache.copy(read_entry(path)) for path in paths])


def _packed(members: Mapping[str, bytes]) -> bytes:
    """Return a bundle of `members`: path in the bundle -> bytes."""
    buffer = io.BytesIO()
    # No time, owner or file name goes in: equal entries make equal bundles.
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(members):
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(members[name]))
    return buffer.getvalue()


# -- reading ---------------------------------------------------------------------------------------


def read_bundle(file: Path, *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> Bundle:
    """Read and verify all entries of a bundle; they live in memory only.

    Nothing is unpacked to the disk, so no name in the file can lead anywhere.

    Parameters
    ----------
    max_unpacked_bytes
        Give up when more than this has been unpacked: 14 MB may hold 3 GiB.

    Raises
    ------
    CacheError
        It cannot be read, is no bundle, is too large, or any entry in it is damaged.
    """
    folders: dict[tuple[str, str], dict[str, bytes]] = {}
    try:
        with open(open_regular(file, follow=True), "rb") as packed:
            status = os.fstat(packed.fileno())
            with gzip.GzipFile(fileobj=packed) as unpacked:
                stream = io.BufferedReader(_Bounded(unpacked, max_unpacked_bytes, file))
                with tarfile.open(fileobj=stream, mode="r|") as tar:
                    _read_files(tar, folders, file)
                # To the end, where the checksum is.
                while stream.read(1 << 20):
                    pass
    except _DAMAGE as error:
        raise CacheError(f"{file}: not a bundle, or damaged: {error}") from error
    except OSError as error:
        raise CacheError(f"{file}: {error.strerror or error}") from error
    entries = [_entry(file, folder, files) for folder, files in sorted(folders.items())]
    return Bundle(file, entries, status)


class _Bounded(io.RawIOBase):
    """The unpacked bytes, counted as they come: what a header promises is not asked."""

    def __init__(self, unpacked: gzip.GzipFile, max_bytes: int, file: Path) -> None:
        self._unpacked = unpacked
        self._left_bytes = self._max_bytes = max_bytes
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._unpacked.readinto(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise CacheError(
                f"{self._file}: unpacks to more than {self._max_bytes} bytes "
                "(max_unpacked_bytes); if that is right, import it with: "
                f"jitkern cache import --max-bytes 4G {self._file}"
            )
        return count


def _read_files(
    tar: tarfile.TarFile, folders: dict[tuple[str, str], dict[str, bytes]], file: Path
) -> None:
    for number, info in enumerate(tar, start=1):
        if number > _MAX_FILES:
            raise CacheError(f"{file}: more than {_MAX_FILES} files")
        folder, name = _split(info, file)
        files = folders.setdefault(folder, {})
        stream = tar.extractfile(info)
        if stream is None or name in files:
            raise CacheError(f"{file}: {info.name!r}: not a plain, single file")
        files[name] = stream.read()


def _split(info: tarfile.TarInfo, file: Path) -> tuple[tuple[str, str], str]:
    parts = info.name.split("/")
    # A sparse file may have any size and no bytes.
    plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not info.issparse()
    if not plain or len(parts) != 3 or not all(map(is_safe_name, parts)):
        raise CacheError(f"{file}: {info.name!r}: not a path of a bundle")
    return (parts[0], parts[1]), parts[2]


def _entry(file: Path, folder: tuple[str, str], files: dict[str, bytes]) -> Entry:
    where = f"{file}: {'/'.join(folder)}"
    raw = files.pop(META_NAME, None)
    if raw is None:
        raise CacheError(f"{where}: {META_NAME} is missing")
    entry = Entry(None, files, parse_meta(raw, where))
    recorded = entry.meta["files"]
    if (entry.key.directory, entry.variant) != folder or set(recorded) != set(files):
        raise CacheError(f"{where}: its meta describes something else")
    for name, expected in recorded.items():
        check_file(name, files[name], expected, where)
    return entry
