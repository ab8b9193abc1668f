"""File names made from content, and files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*\Z")
_UNSAFE_CHAR = re.compile(r"[^A-Za-z0-9_.+-]")

_serial = itertools.count()


def canonical_json(value: object) -> bytes:
    """Render `value` as JSON that is equal byte for byte for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data`, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest(value: object) -> str:
    """Return 20 hex digits of the SHA-256 of `value`'s canonical JSON."""
    return sha256(canonical_json(value))[:20]


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is a plain file name that cannot leave its directory."""
    return len(name) <= 200 and _SAFE_NAME.match(name) is not None


def slug(name: str) -> str:
    """Return `name` with everything but letters, digits, ``_ . + -`` replaced, 80 at most."""
    text = _UNSAFE_CHAR.sub("_", name)[:80].lstrip(".-")
    return text or "module"


def private_name() -> str:
    """Return a name no other process or thread uses: ``<machine>.<pid>.<number>.<time>``."""
    return f"{socket.gethostname()}.{os.getpid()}.{next(_serial)}.{time.time_ns():x}"


def write_whole(file: Path, data: bytes, *, flush: bool = False) -> None:
    """Give `file` the content `data` by one rename, its directory made if need be.

    Readers see the old file or the new one, and a process that runs the old one goes on with it. An
    OSError leaves nothing behind.

    Parameters
    ----------
    flush
        Return only when the bytes are on the disk.
    """
    partial = file.with_name(f".{file.name}.{private_name()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_new(partial, data, flush=flush)
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_new(file: Path, data: bytes, *, flush: bool) -> None:
    """Write a file that is not there yet."""
    with file.open("xb") as out:
        out.write(data)
        if flush:
            out.flush()
            os.fsync(out.fileno())


def flush_directory(path: Path) -> None:
    """Make the names in directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- places that others might reach ----------------------------------------------------------------


def make_folders(path: Path, mode: int = 0o700) -> None:
    """Make the directory `path` and those above it that are missing, of this mode under any umask.

    Raises
    ------
    OSError
        It cannot be made, or is something else.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folders(path.parent, mode)
        make_folders(path, mode)
    else:
        if mode != 0o700:
            set_mode(path, mode)


def set_mode(folder: Path, mode: int) -> None:
    """Give a new directory its mode, but for the setgid bit that the one above hands down."""
    folder.chmod(mode | (folder.stat().st_mode & stat.S_ISGID))


def open_itself(name: str | Path, flags: int = 0, *, dir_fd: int | None = None) -> int:
    """Open a file or a directory for reading, but not through a link; return its descriptor.

    A symbolic link is an OSError (ELOOP), and a FIFO does not keep the process waiting: what it is
    says fstat.

    Parameters
    ----------
    flags
        More flags of open(2), such as ``O_DIRECTORY``.
    dir_fd
        Descriptor of the directory that `name` is relative to.
    """
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=dir_fd)
