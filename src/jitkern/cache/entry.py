"""One cache entry: a directory with the artefact files and a readable, checksummed ``meta.json``.

An entry is found by a key, which stands for what it is made from, and a variant, which says what it
was made with: one directory below the other. Nothing here knows where caches are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitkern.cache.schema import (
    META_MAX_BYTES,
    META_NAME,
    SCHEMA,
    check_file,
    parse_meta,
)
from jitkern.errors import CacheError
from jitkern.files import (
    canonical_json,
    flush_directory,
    is_safe_name,
    read_regular,
    sha256,
    slug,
    write_new,
)

# What render_meta() works out from key, variant and files; the rest of a meta is the builder's.
_DERIVED = ("schema", "route", "name", "family", "toolchain", "describe", "artefact", "files")


@dataclass(frozen=True)
class Key:
    """What an entry is made from.

    Parameters
    ----------
    route
        The way it is built, such as ``"device"``.
    name
        Readable part of the directory's name, e.g. ``store_656_16_4_128_8_true``.
    digest
        20 hex digits over everything but the variant; ``family`` in ``meta.json``.
    describe
        What goes into ``meta.json`` for a reader: op, arguments, arch, flags.
    """

    route: str
    name: str
    digest: str
    describe: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def directory(self) -> str:
        """Name of the directory that holds the variants."""
        return f"{slug(self.name)}-{self.digest}"

    def __str__(self) -> str:
        return self.directory


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
        """Name of the file this entry is about (the first one published)."""
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

    @property
    def key(self) -> Key:
        """The key that it was published under."""
        meta = self.meta
        return Key(meta["route"], meta["name"], meta["family"], meta["describe"])

    @property
    def variant(self) -> str:
        """The variant that it was published as; ``toolchain`` in ``meta.json``."""
        return str(self.meta["toolchain"])

    @property
    def notes(self) -> dict[str, Any]:
        """What the builder had noted in the meta."""
        return {name: value for name, value in self.meta.items() if name not in _DERIVED}


@dataclass(frozen=True)
class EntryInfo:
    """One line of a listing."""

    name: str
    args: str
    arch: str
    route: str
    variant: str
    bytes: int
    last_used: float
    path: Path


def read_meta(path: Path) -> dict[str, Any]:
    """Read and verify ``meta.json`` of the entry at `path`.

    Raises
    ------
    CacheError
        It is damaged. FileNotFoundError and other OSError pass through.
    """
    return parse_meta(read_regular(path / META_NAME, META_MAX_BYTES), str(path / META_NAME))


def read_entry(path: Path, meta: Mapping[str, Any] | None = None) -> Entry:
    """Read the entry at `path`, every byte checked against its recorded SHA-256.

    Parameters
    ----------
    meta
        Its meta, if it has been read already.

    Raises
    ------
    CacheError
        Something in it is damaged or missing.
    FileNotFoundError
        There is no entry.
    """
    if meta is None:
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


def read_info(path: Path) -> EntryInfo:
    """Read what a listing shows of the entry at `path`. Raises as :func:`read_meta`."""
    meta = read_meta(path)
    used = (path / META_NAME).stat()
    describe = meta["describe"]
    return EntryInfo(
        name=describe.get("op", meta["name"]),
        args=", ".join(describe.get("args", ())),
        arch=describe.get("arch", ""),
        route=meta["route"],
        variant=meta["toolchain"],
        bytes=used.st_size + sum(file["bytes"] for file in meta["files"].values()),
        last_used=used.st_mtime,
        path=path,
    )


def render_meta(
    key: Key, variant: str, files: Mapping[str, bytes], notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the meta of an entry that holds `files` (the first one is the artefact)."""
    if not is_safe_name(variant):
        raise ValueError(f"publish: variant: {variant!r}, expected a plain name")
    if not files or not all(is_safe_name(name) for name in files):
        raise ValueError(f"publish: files: {sorted(files)}, expected one or more plain names")
    return {
        **notes,
        "schema": SCHEMA,
        "route": key.route,
        "name": key.name,
        "family": key.digest,
        "toolchain": variant,
        "describe": dict(key.describe),
        "artefact": next(iter(files)),
        "files": {
            name: {"bytes": len(data), "sha256": sha256(data)} for name, data in files.items()
        },
    }


def write_entry(path: Path, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
    """Write `files` and `meta` into the existing directory `path` and flush them to the disk."""
    for name, data in files.items():
        write_new(path / name, data, flush=True)
    body = {**meta, "checksum": sha256(canonical_json(meta))}
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    if len(text) > META_MAX_BYTES:  # nobody would read it back
        raise CacheError(f"{META_NAME}: {len(text)} bytes, expected at most {META_MAX_BYTES}")
    write_new(path / META_NAME, text.encode(), flush=True)
    flush_directory(path)
