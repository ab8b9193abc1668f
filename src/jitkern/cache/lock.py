"""One build per key and node: a file lock with a bounded wait that can name its holder.

Who waited for a build that failed is given its failure, instead of failing once more. Inside one
process a thread lock per key stands in front of the file lock, so that threads do not poll. Nothing
is held over a fork: the child starts with fresh thread locks, and filelock closes its inherited
descriptors.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.cache.cleanup import opened
from jitkern.cache.schema import is_time
from jitkern.errors import CompileError
from jitkern.fs import ForkLocal, make_folders, parse_json, read_regular, write_whole

if TYPE_CHECKING:
    from filelock import BaseFileLock

_POLL_S = 0.01
_FOREVER_S = 86_400.0  # threading refuses timeouts above about 292 years

# Ranks of one job start within seconds of each other; a person who tries again is slower.
_FRESH_S = 10.0

_MAX_HOLDER_BYTES = 4096
_MAX_FAILURE_BYTES = 16 << 20  # nvcc's log of a failed template may have some MB

_thread_locks: ForkLocal[dict[str, threading.Lock]] = ForkLocal(dict)


@dataclass(frozen=True)
class Holder:
    """Who holds a build lock."""

    pid: int
    machine: str
    since_unix_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return f"pid {self.pid} on {self.machine} since {since}"


@dataclass
class Wait:
    """How waiting for a build lock ended: where it is not held, build privately."""

    held: bool = False
    waited_ms: float = 0.0


@contextmanager
def build_lock(
    path: Path, *, timeout_s: float, done: Callable[[], bool], mode: int = 0o600
) -> Iterator[Wait]:
    """Hold the lock file `path` for the body, or give up after `timeout_s` seconds.

    Never raises for a lock that cannot be had: after the timeout it warns once, naming the holder;
    where no lock file can be made (read-only directory, full disk) it yields at once.

    Parameters
    ----------
    path
        The lock file, in a directory that is no symbolic link. ``<path>.holder`` beside it says who
        holds it.
    timeout_s
        Longest wait in seconds, threads of this process included.
    done
        Called while waiting; true ends the wait because there is nothing left to build.
    mode
        Of the lock file, under any umask: who cannot write to it cannot lock it.
    """
    # Imported here: it costs 37 ms, and a warm load never comes this far.
    from filelock import FileLock

    # Soft locks outlive a holder that is killed: a file system without locks is to be an OSError.
    lock = FileLock(path, fallback_to_soft=False, mode=mode)
    start = time.monotonic()
    deadline = start + min(timeout_s, _FOREVER_S)
    wait = Wait()
    with _thread_lock(path, deadline) as thread_held:
        wait.waited_ms = (time.monotonic() - start) * 1e3
        if not thread_held:
            _warn_held(path, timeout_s, "another thread of this process")
        else:
            _acquire(lock, path, deadline, timeout_s, done, wait)
        try:
            yield wait
        finally:
            if wait.held:
                with suppress(OSError):  # a disk that has become read-only meanwhile
                    _holder_path(path).unlink(missing_ok=True)
                lock.release()


@contextmanager
def _thread_lock(path: Path, deadline: float) -> Iterator[bool]:
    lock = _thread_locks.value.setdefault(str(path), threading.Lock())
    held = lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    try:
        yield held
    finally:
        if held:
            lock.release()


def _acquire(
    lock: BaseFileLock,
    path: Path,
    deadline: float,
    timeout_s: float,
    done: Callable[[], bool],
    wait: Wait,
) -> None:
    from filelock import Timeout

    start = time.monotonic()
    try:
        make_folders(path.parent)
        with opened(path.parent):  # a link would have files made somewhere else
            pass
        lock.acquire(timeout=max(0.0, deadline - start), poll_interval=_POLL_S, cancel_check=done)
    except Timeout:
        if not done():
            _warn_held(path, timeout_s, str(read_holder(path) or "an unknown process"))
    except OSError:
        pass  # read-only, full, no directory: the caller builds privately and says so
    else:
        wait.held = True
        _write_holder(path)
    wait.waited_ms += (time.monotonic() - start) * 1e3


def read_holder(path: Path) -> Holder | None:
    """Return who says to hold the lock file `path`, or None where nobody can be read."""
    record = _read(_holder_path(path), _MAX_HOLDER_BYTES)
    fields: list[Any] = [record.get(name) for name in ("pid", "host", "since_unix_s")]
    pid, machine, since_unix_s = fields
    if type(pid) is not int or not 0 < pid < 1 << 31 or not is_time(since_unix_s):
        return None
    if type(machine) is not str or not machine.isprintable():
        return None
    return Holder(pid, machine, since_unix_s)


def _read(file: Path, max_bytes: int) -> dict[str, Any]:
    """Read a record that any process may have left; empty where there is none that makes sense."""
    try:
        record = parse_json(read_regular(file, max_bytes))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _holder_path(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def _write_holder(path: Path) -> None:
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since_unix_s": time.time()}
    with suppress(OSError):  # a full disk: waiters say "an unknown process"; the lock itself holds
        write_whole(_holder_path(path), json.dumps(record).encode())


def _warn_held(path: Path, timeout_s: float, holder: str) -> None:
    warnings.warn(
        f"jitkern: the build lock {path} was still held by {holder} after {timeout_s:g} s "
        "(JITKERN_LOCK_TIMEOUT_S); compiling privately",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass(frozen=True)
class FailureRecord:
    """The file that keeps one key's last failure, so that many ranks report one."""

    path: Path

    def write(self, error: CompileError, inputs: str) -> None:
        """Record `error` for a build of `inputs` (a digest). Best effort: others then build too."""
        record = {
            "at_unix_s": time.time(),
            "inputs": inputs,
            "message": error.message,
            "command": error.command,
            "log": error.log,
            "source": error.source,
        }
        with suppress(OSError):
            make_folders(self.path.parent)
            with opened(self.path.parent):  # no link
                write_whole(self.path, json.dumps(record).encode())

    def recent(self, inputs: str, since_unix_s: float) -> CompileError | None:
        """Return the recorded failure of a build of the same `inputs`, if it is still fresh.

        Parameters
        ----------
        inputs
            Digest of what the build reads, as given to `write`.
        since_unix_s
            When the caller began to wait; a failure recorded later than 10 s before counts. One
            of the future does not: a clock was wrong, and may have been by a day.
        """
        record = _read(self.path, _MAX_FAILURE_BYTES)
        at_unix_s: Any = record.get("at_unix_s")
        if record.get("inputs") != inputs or not is_time(at_unix_s):
            return None
        # Machines that share a file server differ by some seconds.
        if not since_unix_s - _FRESH_S <= at_unix_s <= time.time() + _FRESH_S:
            return None
        told: list[Any] = [record.get(name) for name in ("message", "command", "log")]
        source: Any = record.get("source")
        if not all(type(text) is str for text in told) or type(source) not in (str, type(None)):
            return None
        return CompileError(told[0], command=told[1], log=told[2], source=source)

    def forget(self) -> None:
        """Remove the record: the key has been built."""
        with suppress(OSError), opened(self.path.parent) as folder:  # it grows stale by itself
            os.unlink(self.path.name, dir_fd=folder)
