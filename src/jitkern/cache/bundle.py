"""Bundles: cache entries in one file, to be carried to machines with no compiler.

A bundle is a gzipped tar of ``<name>-<digest>/<variant>/<file>``. The same entries give the same
bytes; everything is verified before anything is used. Whoever wrote the file has written the code.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from jitkern.cache import entry as entries
from jitkern.cache.entry import META_NAME, Entry
from jitkern.cache.store import Cache
from jitkern.cache.trust import written_by_others
from jitkern.errors import CacheError
from jitkern.fs import is_safe_name, open_regular, write_whole

# What damage raises in gzip and tarfile, some of it undocumented: a chain of long names recurses.
_DAMAGE = (
    *(gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError),
    *(ValueError, LookupError, OverflowError, RecursionError),
)


def export_bundle(
    cache: Cache, file: Path, select: Callable[[Entry], bool] = lambda _: True
) -> int:
    """Write the entries of `cache` that `select` accepts into one file; return how many.

    Raises CacheError, and writes nothing, if the file cannot be written, if others could have
    written the cache, or if any entry is damaged: it might be one that is wanted.
    """
    cache.check()
    members: dict[str, bytes] = {}
    count = 0
    for path in cache.paths():
        try:
            entry = Entry(path, {}, entries.read_meta(path, cache.trust))
            if select(entry):
                count += 1
                members[f"{entry}/{META_NAME}"] = entries.meta_bytes(entry.meta)
                for name, data in entries.read_entry(path, cache.trust, entry.meta).files.items():
                    members[f"{entry}/{name}"] = data
        except (OSError, CacheError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
            raise CacheError(
                f"{cache.root}: nothing exported, an entry is damaged or not trusted: {reason}; "
                "build it anew or delete it"
            ) from error
    if not members:
        raise CacheError(f"{cache.root}: nothing to export; jitkern cache list shows what is there")
    try:
        write_whole(file, _packed(members), flush=True)
    except OSError as error:
        raise CacheError(f"{file}: cannot write the bundle: {error.strerror}") from error
    return count


def _packed(members: dict[str, bytes]) -> bytes:
    """Return a bundle of `members`: path in the bundle -> bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in sorted(members):
            # No time, owner or file name goes in: equal entries make equal bundles.
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            tar.addfile(info, io.BytesIO(members[name]))
    return gzip.compress(buffer.getvalue(), mtime=0)


def import_bundle(cache: Cache, file: Path, *, trust: bool = False) -> list[Entry]:
    """Publish every entry of a bundle in `cache`; return them. Raises as ``read_bundle``."""
    return [cache.publish(entry) for entry in read_bundle(file, trust=trust)]


def read_bundle(file: Path, *, trust: bool = False) -> list[Entry]:
    """Read and verify all entries of a bundle; nothing of it is unpacked to the disk.

    Raises CacheError if it cannot be read, is damaged, or, without `trust`, if other users could
    have written it.
    """
    try:
        with open(open_regular(file, follow=True), "rb") as stream:
            if not trust and (reason := written_by_others(os.fstat(stream.fileno()))):
                raise CacheError(
                    f"{file}: {reason}; if you trust them, import it with: "
                    f"jitkern cache import --trust {file}"
                )
            folders = _read_files(gzip.decompress(stream.read()), file)
    except _DAMAGE as error:
        raise CacheError(f"{file}: not a bundle, or damaged: {error}") from error
    except OSError as error:
        raise CacheError(f"{file}: {error.strerror or error}") from error
    return [_entry(file, folder, files) for folder, files in sorted(folders.items())]


def _read_files(tar: bytes, file: Path) -> dict[str, dict[str, bytes]]:
    folders: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as members:
        for info in members:
            parts = info.name.split("/")
            stream = members.extractfile(info) if info.isreg() else None
            if stream is None or len(parts) != 3 or not all(map(is_safe_name, parts)):
                raise CacheError(f"{file}: {info.name!r}: not a path of a bundle")
            files = folders.setdefault(f"{parts[0]}/{parts[1]}", {})
            if parts[2] in files:
                raise CacheError(f"{file}: {info.name!r}: twice")
            files[parts[2]] = stream.read()
    return folders


def _entry(file: Path, folder: str, files: dict[str, bytes]) -> Entry:
    where = f"{file}: {folder}"
    if META_NAME not in files:
        raise CacheError(f"{where}: {META_NAME} is missing")
    entry = Entry(None, files, entries.parse_meta(files.pop(META_NAME), where))
    if str(entry) != folder or entry.meta["files"].keys() != files.keys():
        raise CacheError(f"{where}: its meta describes something else")
    entries.check_files(entry, where)
    return entry
