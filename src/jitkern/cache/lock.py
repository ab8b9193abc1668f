"""One build per key and node: a file lock with a bounded wait that names its holder."""

from __future__ import annotations

import fcntl
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jitkern.cache import stats
from jitkern.env import settings
from jitkern.fs import open_regular, scratch_folder

_POLL_S = 0.01

# Descriptors of the locks that this process holds. A forked child has copies of them, which would
# keep a lock after its holder has ended.
_held: set[int] = set()


def _forget_locks() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def build_lock(
    path: Path, *, timeout_s: float, done: Callable[[], bool], mode: int = 0o600
) -> Iterator[bool]:
    """Hold the lock file `path` for the body; yield whether it is held.

    Without the lock the caller builds privately. That is so after `timeout_s` seconds, with a
    warning that names the holder, at once on a read-only or full disk, and when `done` ends the
    wait: there is nothing left to build.
    """
    start = time.monotonic()
    descriptor = None
    try:
        while (descriptor := _try_lock(path, mode)) is None and not done():
            if time.monotonic() - start >= timeout_s:
                holder = read_holder(path) or "an unknown process"
                warnings.warn(
                    f"jitkern: the build lock {path} was still held by {holder} after "
                    f"{timeout_s:g} s (JITKERN_LOCK_TIMEOUT_S); compiling privately",
                    RuntimeWarning,
                    stacklevel=3,
                )
                break
            time.sleep(_POLL_S)
    except OSError:
        pass  # the caller builds without the lock; publishing will warn if nothing can be kept
    if time.monotonic() - start > 1e-3:
        stats.count("waits")
    try:
        yield descriptor is not None
    finally:
        if descriptor in _held:  # a forked child holds none
            with suppress(OSError):  # a disk that has become read-only meanwhile
                path.unlink(missing_ok=True)
            _held.remove(descriptor)
            os.close(descriptor)


def _try_lock(path: Path, mode: int) -> int | None:
    """Return a descriptor that holds the lock file, which names the holder; None if another does.

    flock, because the lock of a killed process ends with it. Threads exclude each other too.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink == 0:  # deleted by its holder since it was opened
            os.close(descriptor)
            return _try_lock(path, mode)
        if stat.S_IMODE(status.st_mode) != mode:  # less the umask
            os.fchmod(descriptor, mode)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"pid {os.getpid()} on {os.uname().nodename} since {since}"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


@contextmanager
def build_folder(folder: Path | str | None) -> Iterator[Path]:
    """Yield `folder` to build in, locked; a temporary one for None, or if it cannot be locked."""
    if folder is not None:
        path = Path(folder).resolve() / "jitkern.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(path, timeout_s=settings().lock_timeout_s, done=lambda: False) as held:
            if held:
                yield path.parent
                return
    with scratch_folder("build") as scratch:
        yield scratch


def read_holder(path: Path) -> str:
    """Return the note of the process that holds the lock file `path`; empty if none does."""
    try:
        with open(open_regular(path), "rb") as stream:
            text = stream.read(400).decode()
    except (OSError, ValueError):
        return ""
    return text if text.isprintable() else ""
