"""File names made from content, files that are there whole or not at all, and foreign ones read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*\Z")
_UNSAFE_CHAR = re.compile(r"[^A-Za-z0-9_.+-]")

# What private_name() gives, alone or behind the name of the file that was being written.
_PRIVATE_NAME = r"(?P<before>.+\.)(?P<pid>[0-9]{1,10})\.[0-9a-f]{16}\Z"

_DEAD_S = 600.0  # pids of two containers may look alike, so even a dead one's files rest a while
_OLD_S = 86_400.0

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


def private_name() -> str:
    """Return a name that nobody else uses or can guess: ``<machine>.<pid>.<16 hex digits>``."""
    # Not secrets.token_hex, which is the same: its import costs 2 ms in every process.
    return f"{socket.gethostname()}.{os.getpid()}.{os.urandom(8).hex()}"


def is_abandoned(name: str, age_s: float, dead_s: float = _DEAD_S) -> bool:
    """Tell whether what ends with a private name was left by a process that is no more.

    Parameters
    ----------
    name
        Its name; one of another shape is never abandoned.
    age_s
        Seconds since it was last written to; negative where the clock has been set back since.
    dead_s
        How old it has to be where its process is known to be gone. Otherwise that is a day.
    """
    match = re.match(_PRIVATE_NAME, name)
    if match is None:
        return False
    here = f".{match['before']}".endswith(f".{socket.gethostname()}.")
    dead = here and not os.path.exists(f"/proc/{match['pid']}")
    return abs(age_s) > (dead_s if dead else _OLD_S)


# -- writing ---------------------------------------------------------------------------------------


def write_whole(file: Path, data: bytes, *, flush: bool = False, mode: int | None = None) -> None:
    """Give `file` the content `data` by one rename, its directory made if need be.

    Readers see the old file or the new one, and a process that runs the old one goes on with it. A
    link in its place is replaced, and what it leads to left alone. An OSError leaves nothing
    behind.

    Parameters
    ----------
    flush
        Return only when the bytes are on the disk.
    mode
        As for :func:`write_new`.
    """
    partial = file.with_name(f".{file.name}.{private_name()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_new(partial, data, flush=flush, mode=mode)
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_new(file: Path, data: bytes, *, flush: bool, mode: int | None = None) -> None:
    """Write a file that is not there yet.

    Parameters
    ----------
    mode
        Its mode, whatever the umask; by default all may read it as far as the umask allows, and
        nobody else may write to it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o644 if mode is None else 0o600), "wb") as out:
        if mode is not None:
            os.fchmod(out.fileno(), mode)
        out.write(data)
        if flush:
            out.flush()
            os.fsync(out.fileno())


def append(file: Path, data: bytes) -> int:
    """Add `data` to the end of `file` by one write; the file is made if need be.

    Returns
    -------
    int
        Where `data` ends in it, bytes.

    Raises
    ------
    OSError
        It cannot be written, or is not plainly this user's: a link, no regular file, one with
        another name elsewhere, somebody else's.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = _open(file, flags, follow=False)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            _refuse(errno.EINVAL, "not a regular file", file)
        if status.st_nlink > 1:
            _refuse(errno.EMLINK, f"a file of {status.st_nlink} names, expected one", file)
        if status.st_uid not in (os.geteuid(), 0):
            _refuse(errno.EPERM, f"belongs to uid {status.st_uid}", file)
        count = os.write(descriptor, data)
        if count < len(data):
            _refuse(errno.ENOSPC, f"{count} of {len(data)} bytes written, the disk is full", file)
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    finally:
        os.close(descriptor)


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
        _make_folder(path, mode)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folders(path.parent, mode)
        _make_folder(path, mode)  # once: in /proc nothing can be made, which says the same


def _make_folder(path: Path, mode: int) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
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
    descriptor = _open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, follow, dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _refuse(errno.EINVAL, "not a regular file", file)
    return descriptor


def read_regular(
    file: Path | str, max_bytes: int, *, follow: bool = False, dir_fd: int | None = None
) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; see :func:`open_regular`."""
    with open(open_regular(file, follow=follow, dir_fd=dir_fd), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            _refuse(errno.EFBIG, f"{size} bytes, expected at most {max_bytes}", file)
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


def _open(file: Path | str, flags: int, follow: bool, dir_fd: int | None = None) -> int:
    flags |= os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(file, flags, 0o644, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            _refuse(errno.ELOOP, "a symbolic link, which is not followed here", file)
        raise


def _refuse(number: int, reason: str, file: Path | str) -> NoReturn:
    raise OSError(number, reason, str(file))
