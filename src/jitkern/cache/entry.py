"""One cache entry: a directory with the artefact files and a readable, checksummed ``meta.json``.

Nothing here knows where caches live or how they are searched; see :mod:`jitkern.cache.store`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitkern.errors import CacheError
from jitkern.names import canonical_json, is_safe_name, slug

SCHEMA = 1
META_NAME = "meta.json"


@dataclass(frozen=True)
class Key:
    """What an entry is found by.

    Parameters
    ----------
    route
        ``"device"``, ``"cxx"`` or ``"cuda"``.
    name
        Readable part of the directory's name, e.g. ``store_656_16_4``.
    family
        20 hex digits over everything but the toolchain.
    toolchain
        E.g. ``nvrtc-13.5``; empty where no toolchain is installed, which makes an entry of any
        recorded toolchain good.
    describe
        What goes into ``meta.json`` for a reader: op, arguments, arch, flags.
    """

    route: str
    name: str
    family: str
    toolchain: str
    describe: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def directory(self) -> str:
        """Name of the family's directory."""
        return f"{slug(self.name)}-{self.family}"

    def __str__(self) -> str:
        return f"{self.directory}/{self.toolchain or 'any'}"


@dataclass(frozen=True)
class Entry:
    """A verified entry: the bytes are those that were published.

    `path` is None where nothing could be written and the entry lives in memory only.
    """

    path: Path | None
    files: Mapping[str, bytes]
    meta: Mapping[str, Any]

    @property
    def artefact_name(self) -> str:
        """Name of the file this entry is about (the first one recorded)."""
        return str(self.meta["artefact"])

    @property
    def data(self) -> bytes:
        """Bytes of the artefact."""
        return self.files[self.artefact_name]

    @property
    def artefact(self) -> Path:
        """Path of the artefact.

        Raises
        ------
        CacheError
            The entry lives in memory only.
        """
        if self.path is None:
            raise CacheError(f"{self.artefact_name}: no directory to keep it in can be written")
        return self.path / self.artefact_name


def parse_meta(raw: bytes, where: str) -> dict[str, Any]:
    """Parse the text of a ``meta.json`` and verify its checksum.

    Raises
    ------
    CacheError
        It is damaged; the message starts with `where`.
    """
    try:
        meta = json.loads(raw)
    except ValueError as error:
        raise CacheError(f"{where}: not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CacheError(f"{where}: not an object")
    checksum = meta.pop("checksum", None)
    if checksum != hashlib.sha256(canonical_json(meta)).hexdigest():
        raise CacheError(f"{where}: checksum does not match")
    if meta.get("schema") != SCHEMA:
        raise CacheError(f"{where}: schema {meta.get('schema')}, expected {SCHEMA}")
    return meta


def check_file(name: str, data: bytes, expected: Mapping[str, Any], where: str) -> None:
    """Raise CacheError unless `data` is what the meta recorded for file `name`."""
    if not is_safe_name(name):
        raise CacheError(f"{where}: file name {name!r}, expected a plain name")
    if len(data) != expected["bytes"]:
        raise CacheError(f"{where}: {name}: {len(data)} bytes, expected {expected['bytes']}")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CacheError(f"{where}: {name}: checksum does not match")


def read_meta(path: Path) -> dict[str, Any]:
    """Read and verify ``meta.json`` of the entry at `path`.

    Raises
    ------
    CacheError
        It is damaged. FileNotFoundError and other OSError pass through.
    """
    return parse_meta((path / META_NAME).read_bytes(), str(path / META_NAME))


def read_entry(path: Path) -> Entry:
    """Read the entry at `path`, every byte checked against its recorded SHA-256.

    Raises
    ------
    CacheError
        Something in it is damaged or missing.
    FileNotFoundError
        There is no entry.
    """
    meta = read_meta(path)
    files: dict[str, bytes] = {}
    for name, expected in meta["files"].items():
        try:
            # The name is checked before the path is touched: a meta may come from anywhere.
            data = (path / name).read_bytes() if is_safe_name(name) else b""
        except OSError as error:
            raise CacheError(f"{path / name}: {error.strerror}") from error
        check_file(name, data, expected, str(path))
        files[name] = data
    return Entry(path, files, meta)


def render_meta(key: Key, files: Mapping[str, bytes], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meta of an entry that holds `files` (the first one is the artefact)."""
    if not files or not all(is_safe_name(name) for name in files):
        raise ValueError(f"publish: files: {sorted(files)}, expected one or more plain names")
    return {
        **extra,
        "schema": SCHEMA,
        "route": key.route,
        "name": key.name,
        "family": key.family,
        "toolchain": key.toolchain,
        "describe": dict(key.describe),
        "artefact": next(iter(files)),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        },
    }


def write_entry(path: Path, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
    """Write `files` and `meta` into the existing directory `path` and flush them to the disk."""
    for name, data in files.items():
        _write_flushed(path / name, data)
    body = dict(meta)
    body["checksum"] = hashlib.sha256(canonical_json(body)).hexdigest()
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    _write_flushed(path / META_NAME, text.encode())
    flush_directory(path)


def flush_directory(path: Path) -> None:
    """Make the names in directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
