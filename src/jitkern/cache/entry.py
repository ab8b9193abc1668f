"""One cache entry: a directory with the artefact files and a readable, checksummed ``meta.json``.

An entry is found by a key, which stands for what it is made from, and a variant, which says what it
was made with: one directory below the other. Nothing here knows where caches are.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jitkern.cache.schema import META_MAX_BYTES, META_NAME, check_file, parse_meta
from jitkern.cache.trust import require_trusted
from jitkern.env import Trust
from jitkern.errors import CacheError
from jitkern.fs import is_safe_name, open_itself, slug

# What `write` works out from key, variant and files; the rest of a meta is the builder's.
_DERIVED = ("schema", "route", "name", "family", "toolchain", "describe", "artefact", "files")


class Key(NamedTuple):
    """What an entry is made from.

    Attributes
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
    describe: Mapping[str, Any] = MappingProxyType({})

    @property
    def directory(self) -> str:
        """Name of the directory that holds the variants."""
        return f"{slug(self.name)}-{self.digest}"

    @property
    def op(self) -> str:
        """The op, or the name that load_jit was given."""
        return str(self.describe.get("op", self.name))

    @property
    def args(self) -> tuple[str, ...]:
        """Its template arguments."""
        return tuple(self.describe.get("args", ()))

    @property
    def arch(self) -> str:
        """What it is for, such as ``9.0``; empty for host code."""
        return str(self.describe.get("arch", ""))

    def __str__(self) -> str:
        return self.directory


class Entry(NamedTuple):
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
    def artefact(self) -> Path | None:
        """Path of the artefact, if it is in a directory."""
        return None if self.path is None else self.path / self.artefact_name

    @property
    def key(self) -> Key:
        """The key that it was published under."""
        return key_of(self.meta)

    @property
    def variant(self) -> str:
        """The variant that it was published as; ``toolchain`` in ``meta.json``."""
        return str(self.meta["toolchain"])

    @property
    def notes(self) -> dict[str, Any]:
        """What the builder had noted in the meta."""
        return {name: value for name, value in self.meta.items() if name not in _DERIVED}


class OpenEntry:
    """The directory of an entry, held open: neither it nor its key's was reached through a link.

    Parameters
    ----------
    path
        The directory.
    trust
        Who may have written it beside this user and root; None does not look.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no entry.
    UntrustedError
        Somebody else can have written it. So do the methods.
    """

    def __init__(self, path: Path, trust: Trust | None = None) -> None:
        self.path = path
        self._trust = trust
        key = self._open(path.parent, os.O_DIRECTORY)[0]
        try:
            self._folder = self._open(path, os.O_DIRECTORY, key)[0]
        finally:
            os.close(key)

    def __enter__(self) -> OpenEntry:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def meta(self) -> dict[str, Any]:
        """Read and verify its ``meta.json``.

        Raises
        ------
        CacheError
            It is damaged, or of another entry. FileNotFoundError and other OSError pass through.
        """
        file = self.path / META_NAME
        meta = parse_meta(self._read(file, META_MAX_BYTES), str(file))
        place = (f"{slug(meta['name'])}-{meta['family']}", meta["toolchain"])
        if place != (self.path.parent.name, self.path.name):
            raise CacheError(f"{file}: its meta is that of {'/'.join(place)}")
        return meta

    def entry(self, meta: Mapping[str, Any]) -> Entry:
        """Read all of it, every byte checked against the SHA-256 that `meta` records.

        Raises
        ------
        CacheError
            Something in it is damaged or missing.
        """
        files: dict[str, bytes] = {}
        for name, expected in meta["files"].items():
            try:
                # The name is checked before the path is touched: a meta may come from anywhere.
                data = self._read(self.path / name) if is_safe_name(name) else b""
            except OSError as error:
                raise CacheError(f"{self.path / name}: {error.strerror}") from error
            check_file(name, data, expected, str(self.path))
            files[name] = data
        return Entry(self.path, files, meta)

    def _open(
        self, path: Path, flags: int = 0, folder: int | None = None
    ) -> tuple[int, os.stat_result]:
        try:
            descriptor = open_itself(path if folder is None else path.name, flags, dir_fd=folder)
        except OSError as error:
            error.filename = str(path)  # not what it is called in `folder`
            raise
        try:
            status = os.fstat(descriptor)
            if self._trust is not None:
                require_trusted(path, status, self._trust)
        except (OSError, CacheError):
            os.close(descriptor)
            raise
        return descriptor, status

    def _read(self, file: Path, max_bytes: float = math.inf) -> bytes:
        try:
            descriptor, status = self._open(file, folder=self._folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CacheError(f"{file}: a symbolic link, expected a regular file") from error
            raise
        with open(descriptor, "rb", buffering=0) as stream:
            if not stat.S_ISREG(status.st_mode):
                raise CacheError(f"{file}: not a regular file")
            if status.st_size > max_bytes:
                raise CacheError(f"{file}: {status.st_size} bytes, expected at most {max_bytes}")
            return stream.read()


def read_meta(path: Path, trust: Trust | None = None) -> dict[str, Any]:
    """Read and verify ``meta.json`` of the entry at `path`; raises as :class:`OpenEntry`."""
    with OpenEntry(path, trust) as opened:
        return opened.meta()


def read_entry(path: Path, trust: Trust | None = None) -> Entry:
    """Read and verify the entry at `path`; raises as :class:`OpenEntry`."""
    with OpenEntry(path, trust) as opened:
        return opened.entry(opened.meta())


def key_of(meta: Mapping[str, Any]) -> Key:
    """Return the key of an entry that has this meta."""
    return Key(meta["route"], meta["name"], meta["family"], meta["describe"])
