"""One cache entry: a folder with the built files and a readable, checksummed ``meta.json``.

A key stands for what an entry is made from, a variant for what it was made with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.errors import CacheError
from jitkern.fs import canonical_json, is_safe_name, open_regular, parse_json, sha256, slug

SCHEMA = 1
META_NAME = "meta.json"
_MAX_META_BYTES = 16 << 20  # the log of a compiler is in it
_MAX_FILE_BYTES = 1 << 30


class Key(NamedTuple):
    """The identity of an entry: everything that it is made from."""

    route: str  # how it is built, such as "device"
    name: str  # readable part of the folder's name, e.g. store_656_16_4_128_8_true
    digest: str  # 20 hex digits over everything but the variant; "family" in meta.json
    describe: Mapping[str, Any] = {}  # shown in meta.json

    @property
    def op(self) -> str:
        """The op, or the name that load_jit was given."""
        return str(self.describe.get("op", self.name))

    @property
    def args(self) -> tuple[str, ...]:
        return tuple(self.describe.get("args", ()))

    @property
    def arch(self) -> str:
        return str(self.describe.get("arch", ""))

    def __str__(self) -> str:
        """Return the name of its folder in a cache."""
        return f"{slug(self.name)}-{self.digest}"


class Entry(NamedTuple):
    """A build result: read from a cache and verified, or just built."""

    path: Path | None  # None for one that is in memory only
    files: Mapping[str, bytes]  # empty if it is only listed
    meta: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.key}/{self.variant}"

    def __repr__(self) -> str:
        return f"<Entry {self}, {self.size_bytes:,} bytes>"

    @property
    def size_bytes(self) -> int:
        return sum(file["bytes"] for file in self.meta["files"].values())

    @property
    def artefact_name(self) -> str:
        return str(self.meta["artefact"])

    @property
    def data(self) -> bytes:
        return self.files[self.artefact_name]

    @property
    def artefact(self) -> Path | None:
        return None if self.path is None else self.path / self.artefact_name

    @property
    def key(self) -> Key:
        return Key(*(self.meta[name] for name in ("route", "name", "family", "describe")))

    @property
    def variant(self) -> str:
        """What it was built with; ``toolchain`` in ``meta.json``."""
        return str(self.meta["toolchain"])


def new_entry(
    key: Key, variant: str, files: Mapping[str, bytes], notes: Mapping[str, Any] = {}
) -> Entry:
    """Return an entry of what was built, to be published; the first file is the artefact."""
    recorded = {name: {"bytes": len(d), "sha256": sha256(d)} for name, d in files.items()}
    meta = {
        **notes,
        "schema": SCHEMA,
        "route": key.route,
        "name": key.name,
        "family": key.digest,
        "toolchain": variant,
        "describe": dict(key.describe),
        "artefact": next(iter(files)),
        "files": recorded,
    }
    return Entry(None, files, meta)


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return the text of a ``meta.json``; equal metas give equal bytes."""
    body = {**meta, "checksum": sha256(canonical_json(meta))}
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def read_meta(path: Path) -> dict[str, Any]:
    """Read and verify ``meta.json`` of the entry at `path`.

    Raises FileNotFoundError or NotADirectoryError if there is no entry, CacheError if it is
    damaged.
    """
    file = path / META_NAME
    try:
        meta = parse_json(_read(file, _MAX_META_BYTES))
    except ValueError as error:
        raise CacheError(f"{file}: not JSON: {error}") from error
    if not isinstance(meta, dict) or meta.pop("checksum", None) != sha256(canonical_json(meta)):
        raise CacheError(f"{file}: checksum does not match")
    with suppress(LookupError, TypeError, AttributeError):
        if _is_sound(meta):
            if (name := str(Entry(path, {}, meta))) != f"{path.parent.name}/{path.name}":
                raise CacheError(f"{file}: its meta is that of {name}")
            return meta
    raise CacheError(f"{file}: not a meta of schema {SCHEMA}")


def read_entry(path: Path, meta: Mapping[str, Any] | None = None) -> Entry:
    """Read the entry at `path`, every byte checked against its meta. Raises as `read_meta`."""
    meta = read_meta(path) if meta is None else meta
    files = {}
    for name, expected in meta["files"].items():
        data = files[name] = _read(path / name, _MAX_FILE_BYTES)
        if len(data) != expected["bytes"] or sha256(data) != expected["sha256"]:
            raise CacheError(f"{path}: {name}: checksum does not match")
    return Entry(path, files, meta)


def _read(file: Path, max_bytes: int) -> bytes:
    with open(open_regular(file), "rb", buffering=0) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes > max_bytes:  # a sparse file has any size
            raise CacheError(f"{file}: {num_bytes} bytes, expected at most {max_bytes}")
        return stream.read()


def _is_sound(meta: Mapping[str, Any]) -> bool:
    """Tell whether the fields that other code relies on are there and of the expected types."""
    describe, files = meta["describe"], meta["files"]
    texts = [meta[name] for name in ("route", "name", "family", "toolchain")]
    texts += [describe.get("op", ""), describe.get("arch", ""), *describe.get("args", [])]
    texts += [file["sha256"] for file in files.values()]
    numbers = [file["bytes"] for file in files.values()]
    numbers += [meta.get("build_ms") or 0, meta.get("built_unix_s") or 0]
    return (
        meta["schema"] == SCHEMA
        and all(isinstance(text, str) for text in texts)
        # Comparisons with NaN fail, and those with infinity.
        and all(type(number) in (int, float) and 0 <= number < 1e11 for number in numbers)
        and all(map(is_safe_name, [meta["family"], meta["toolchain"], *files]))
        and meta["artefact"] in files
    )
