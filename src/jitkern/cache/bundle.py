"""Bundles: any number of cache entries in one file, to be carried to machines with no compiler.

A bundle is a gzipped tar of ``<name>-<digest>/<variant>/<file>``. The same entries give the same
bytes; everything is verified before anything is used.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from jitkern.cache.entry import META_NAME, Entry, EntryInfo, check_file, parse_meta, read_entry
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.files import is_safe_name, write_whole


def export_bundle(
    cache: Cache, file: Path, select: Callable[[EntryInfo], bool] = lambda _: True
) -> int:
    """Write the sound entries of `cache` that `select` accepts into one file; return how many.

    The same entries give the same file, byte for byte.

    Raises
    ------
    CacheError
        The file cannot be written.
    """
    members: dict[str, bytes] = {}
    count = 0
    for info in cache.entries():
        if not select(info):
            continue
        try:
            entry = read_entry(info.path)
            meta = (info.path / META_NAME).read_bytes()
        except (OSError, CacheError):
            continue
        folder = f"{info.path.parent.name}/{info.path.name}"
        members[f"{folder}/{META_NAME}"] = meta
        members.update({f"{folder}/{name}": data for name, data in entry.files.items()})
        count += 1
    try:
        write_whole(file, _packed(members), flush=True)
    except OSError as error:
        raise CacheError(f"{file}: cannot write the bundle: {error.strerror}") from error
    return count


def import_bundle(cache: Cache, file: Path) -> int:
    """Publish every entry of a bundle in `cache`; return how many.

    Everything is verified first: a damaged bundle changes nothing.

    Raises
    ------
    CacheError
        The file is damaged, or the cache cannot be written.
    """
    entries = read_bundle(file)
    for entry in entries:
        cache.copy(entry)
    return len(entries)


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


def read_bundle(file: Path) -> list[Entry]:
    """Read and verify all entries of a bundle; they live in memory only.

    Nothing is unpacked to the disk, so no name in the file can lead anywhere.

    Raises
    ------
    CacheError
        It cannot be read, is no bundle, or any entry in it is damaged.
    """
    folders: dict[tuple[str, str], dict[str, bytes]] = {}
    try:
        # Unpacked as a whole: read piece by piece, the checksum at its end would go unread.
        unpacked = gzip.decompress(file.read_bytes())
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            for info in tar:
                folder, name = _split(info, file)
                stream = tar.extractfile(info)
                files = folders.setdefault(folder, {})
                if stream is None or name in files:
                    raise CacheError(f"{file}: {info.name}: not a plain, single file")
                files[name] = stream.read()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CacheError(f"{file}: not a bundle, or damaged: {error}") from error
    except OSError as error:
        raise CacheError(f"{file}: {error.strerror or error}") from error
    return [_entry(file, folder, files) for folder, files in sorted(folders.items())]


def _split(info: tarfile.TarInfo, file: Path) -> tuple[tuple[str, str], str]:
    parts = info.name.split("/")
    if not info.isreg() or len(parts) != 3 or not all(map(is_safe_name, parts)):
        raise CacheError(f"{file}: {info.name}: not a path of a bundle")
    return (parts[0], parts[1]), parts[2]


def _entry(file: Path, folder: tuple[str, str], files: dict[str, bytes]) -> Entry:
    where = f"{file}: {'/'.join(folder)}"
    raw = files.pop(META_NAME, None)
    if raw is None:
        raise CacheError(f"{where}: {META_NAME} is missing")
    entry = Entry(None, files, parse_meta(raw, where))
    try:
        recorded = entry.meta["files"]
        if (entry.key.directory, entry.variant) != folder or set(recorded) != set(files):
            raise CacheError(f"{where}: its meta describes something else")
        for name, expected in recorded.items():
            check_file(name, files[name], expected, where)
        _ = entry.data
    except (KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{where}: its meta lacks {error}") from error
    return entry
