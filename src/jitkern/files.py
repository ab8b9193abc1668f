"""File names made from content, and files read that may be anybody's."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*\Z")
_UNSAFE_CHAR = re.compile(r"[^A-Za-z0-9_.+-]")

_MAX_NESTING = 32


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


def open_file(file: Path | str, flags: int, follow: bool, dir_fd: int | None = None) -> int:
    """Open a file with these flags of open(2); a link in its place is an OSError without `follow`.

    One that is made may be read by all, as far as the umask allows.
    """
    flags |= os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(file, flags, 0o644, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            refuse(errno.ELOOP, "a symbolic link, which is not followed here", file)
        raise


def refuse(number: int, reason: str, file: Path | str) -> NoReturn:
    """Raise the OSError that says `reason` of `file`."""
    raise OSError(number, reason, str(file))


def open_regular(file: Path | str, *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Open a regular file for reading; return its descriptor.

    A FIFO in its place would keep the process waiting, and a device has no end.

    Parameters
    ----------
    follow
        Follow a symbolic link in its place, as for a file that the user has named.
    dir_fd
        Descriptor of the directory that `file` is relative to.

    Raises
    ------
    OSError
        It cannot be opened, or is something else.
    """
    descriptor = open_file(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, follow, dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse(errno.EINVAL, "not a regular file", file)
    return descriptor


def read_regular(
    file: Path | str, max_bytes: int, *, follow: bool = False, dir_fd: int | None = None
) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; see :func:`open_regular`."""
    with open(open_regular(file, follow=follow, dir_fd=dir_fd), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            refuse(errno.EFBIG, f"{size} bytes, expected at most {max_bytes}", file)
        return stream.read(size + 1)


def parse_json(raw: bytes) -> Any:
    """Parse JSON that may come from anywhere.

    Raises
    ------
    ValueError
        It is not UTF-8 or not JSON (NaN and Infinity are not), or nested deeper than 32 levels,
        which would end what walks it later on in a RecursionError.
    """
    try:
        value = _DECODER.decode(raw.decode())
    except RecursionError:
        value = None
        deep = True
    else:
        # There are no more levels than brackets: a meta of ours needs no walk.
        deep = raw.count(b"[") + raw.count(b"{") > _MAX_NESTING and _is_deep(value)
    if deep:
        raise ValueError(f"nested deeper than {_MAX_NESTING} levels")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_NESTING):
        inside: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inside += outer.values()
            elif isinstance(outer, list):
                inside += outer
        level = inside
    return any(isinstance(inner, (dict, list)) for inner in level)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
