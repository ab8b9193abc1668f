"""Files that are there whole or not at all, and directories that others may not write to."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path

from jitkern.files import open_file, refuse

# What private_name() gives, alone or behind the name of the file that was being written.
_PRIVATE_NAME = r"(?P<before>.+\.)(?P<pid>[0-9]{1,10})\.[0-9a-f]{16}\Z"

_DEAD_S = 600.0  # pids of two containers may look alike, so even a dead one's files rest a while
_OLD_S = 86_400.0


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
    if not file.name:  # `.` and `/`
        refuse(errno.EISDIR, "a directory, expected a file", file)
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


def open_to_append(file: Path) -> int:
    """Open `file` to be read and added to, made if need be; return its descriptor.

    Raises
    ------
    OSError
        It cannot be opened, or is not plainly this user's: a link, no regular file, one with
        another name elsewhere, somebody else's.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = open_file(file, flags, follow=False)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            refuse(errno.EINVAL, "not a regular file", file)
        if status.st_nlink > 1:
            refuse(errno.EMLINK, f"a file of {status.st_nlink} names, expected one", file)
        if status.st_uid not in (os.geteuid(), 0):
            refuse(errno.EPERM, f"belongs to uid {status.st_uid}", file)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def append(descriptor: int, data: bytes, file: Path) -> int:
    """Add `data` by one write to `file`, which :func:`open_to_append` has opened.

    Returns
    -------
    int
        Where `data` ends in it, bytes.

    Raises
    ------
    OSError
        It cannot be written, or not all of it.
    """
    count = os.write(descriptor, data)
    if count < len(data):
        refuse(errno.ENOSPC, f"{count} of {len(data)} bytes written, the disk is full", file)
    return os.lseek(descriptor, 0, os.SEEK_CUR)


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
