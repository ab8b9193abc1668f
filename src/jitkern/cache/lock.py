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
from typing import TYPE_CHECKING

from jitkern.errors import CompileError
from jitkern.files import write_whole
from jitkern.forks import PerProcess

if TYPE_CHECKING:
    from filelock import BaseFileLock

_POLL_S = 0.01
_FOREVER_S = 86_400.0  # threading refuses timeouts above about 292 years

# Ranks of one job start within seconds of each other; a person who tries again is slower.
_FRESH_S = 10.0

_thread_locks: PerProcess[dict[str, threading.Lock]] = PerProcess(dict)


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
def build_lock(path: Path, *, timeout_s: float, done: Callable[[], bool]) -> Iterator[Wait]:
    """Hold the lock file `path` for the body, or give up after `timeout_s` seconds.

    Never raises for a lock that cannot be had: after the timeout it warns once, naming the holder;
    where no lock file can be made (read-only directory, full disk) it yields at once.

    Parameters
    ----------
    path
        The lock file. ``<path>.holder`` beside it says who holds it.
    timeout_s
        Longest wait in seconds, threads of this process included.
    done
        Called while waiting; true ends the wait because there is nothing left to build.
    """
    start = time.monotonic()
    deadline = start + min(timeout_s, _FOREVER_S)
    wait = Wait()
    with _thread_lock(path, deadline) as thread_held:
        wait.waited_ms = (time.monotonic() - start) * 1e3
        if not thread_held:
            _warn_held(path, timeout_s, "another thread of this process")
        lock = _acquire(path, deadline, timeout_s, done, wait) if thread_held else None
        try:
            yield wait
        finally:
            if lock is not None:
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
    path: Path, deadline: float, timeout_s: float, done: Callable[[], bool], wait: Wait
) -> BaseFileLock | None:
    # Imported here: it costs 37 ms, and a warm load never comes this far.
    from filelock import FileLock, Timeout

    # Soft locks outlive a holder that is killed: a file system without locks is to be an OSError.
    lock = FileLock(path, fallback_to_soft=False)
    start = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    return lock if wait.held else None


def read_holder(path: Path) -> Holder | None:
    """Return who says to hold the lock file `path`, or None where nobody can be read."""
    try:
        record = json.loads(_holder_path(path).read_bytes())
        return Holder(int(record["pid"]), str(record["host"]), float(record["since_unix_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder_path(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def _write_holder(path: Path) -> None:
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since_unix_s": time.time()}
    with suppress(OSError):  # a full disk: waiters say "an unknown process"; the lock itself holds
        _holder_path(path).write_text(json.dumps(record))


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
            write_whole(self.path, json.dumps(record).encode())

    def recent(self, inputs: str, since_unix_s: float) -> CompileError | None:
        """Return the recorded failure of a build of the same `inputs`, if it is still fresh.

        Parameters
        ----------
        inputs
            Digest of what the build reads, as given to `write`.
        since_unix_s
            When the caller began to wait; a failure recorded later than 10 s before counts.
        """
        try:
            record = json.loads(self.path.read_bytes())
            if record["inputs"] != inputs or record["at_unix_s"] < since_unix_s - _FRESH_S:
                return None
            return CompileError(
                str(record["message"]),
                command=str(record["command"]),
                log=str(record["log"]),
                source=record["source"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self) -> None:
        """Remove the record: the key has been built."""
        with suppress(OSError):  # it grows stale by itself
            self.path.unlink(missing_ok=True)
