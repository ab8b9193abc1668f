"""Bundles: any number of cache entries in one file, to be carried to machines with no compiler.

A bundle is a gzipped tar of ``<name>-<family>/<toolchain>/<file>``. The same entries give the same
bytes; everything is verified before anything is used.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jitkern.cache.entry import META_NAME, Key, check_file, parse_meta
from jitkern.errors import CacheError
from jitkern.names import is_safe_name

BundledEntry = tuple[Key, dict[str, bytes], dict[str, Any]]

# What render_meta() works out again from key and files.
_DERIVED = ("schema", "route", "name", "family", "toolchain", "describe", "artefact", "files")


def write(file: Path, members: Mapping[str, bytes]) -> None:
    """Write `members` (path in the bundle -> bytes) to `file` by one atomic rename.

    Raises
    ------
    CacheError
        The file cannot be written.
    """
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
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            out.write(buffer.getbuffer())
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CacheError(f"{file}: cannot write the bundle: {error.strerror}") from error


def read_entries(file: Path) -> list[BundledEntry]:
    """Read and verify all entries of bundle `file`.

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


def _entry(file: Path, folder: tuple[str, str], files: dict[str, bytes]) -> BundledEntry:
    where = f"{file}: {'/'.join(folder)}"
    raw = files.pop(META_NAME, None)
    if raw is None:
        raise CacheError(f"{where}: {META_NAME} is missing")
    meta = parse_meta(raw, where)
    try:
        key = Key(
            route=meta["route"],
            name=meta["name"],
            family=meta["family"],
            toolchain=meta["toolchain"],
            describe=meta["describe"],
        )
        if (key.directory, key.toolchain) != folder or set(meta["files"]) != set(files):
            raise CacheError(f"{where}: its meta describes something else")
        for name, expected in meta["files"].items():
            check_file(name, files[name], expected, where)
        artefact = meta["artefact"]
        # The first file of a publication is its artefact.
        ordered = {artefact: files[artefact], **files}
    except (KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{where}: its meta lacks {error}") from error
    extra = {name: value for name, value in meta.items() if name not in _DERIVED}
    return key, ordered, extra
