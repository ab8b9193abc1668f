"""One build per key and node: a file lock with a bounded wait that can name its holder.

Inside one process a thread lock per key stands in front of the file lock, so that threads do not
poll. Nothing is held over a fork: the child starts with fresh thread locks, and filelock closes
its inherited descriptors.
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

_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.05

_FORK_WAIT_S = 30.0

_thread_locks: dict[str, threading.Lock] = {}
_thread_locks_guard = threading.Lock()
_fork_gate = threading.Condition()
_inside = 0


def _before_fork() -> None:
    # Bounded: a fork that comes too early is a risk, one that never comes is a hang.
    _fork_gate.acquire()
    _fork_gate.wait_for(lambda: _inside == 0, timeout=_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    _fork_gate.release()


def _after_fork_in_child() -> None:
    # A lock held by another thread of the parent would never be released in the child.
    global _thread_locks_guard, _fork_gate, _inside
    _thread_locks_guard = threading.Lock()
    _thread_locks.clear()
    _fork_gate = threading.Condition()
    _inside = 0


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


@contextmanager
def no_fork() -> Iterator[None]:
    """Hold off a fork in other threads for the body.

    A child that is forked while a compiler library is at work inherits its locks as they are, and
    its own first compile never ends (seen with NVRTC 13.5).
    """
    global _inside
    with _fork_gate:
        _inside += 1
    try:
        yield
    finally:
        with _fork_gate:
            _inside -= 1
            _fork_gate.notify_all()


@dataclass(frozen=True)
class Holder:
    """Who holds a build lock."""

    pid: int
    host: str
    since_unix_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return f"pid {self.pid} on {self.host} since {since}"


@dataclass
class Wait:
    """How waiting for a build lock ended.

    Attributes
    ----------
    held
        The lock is ours. Where it is not, build privately.
    satisfied
        What the lock protects appeared while waiting; there is nothing left to build.
    waited_ms
        Time spent waiting, in milliseconds.
    """

    held: bool = False
    satisfied: bool = False
    waited_ms: float = 0.0


@contextmanager
def build_lock(path: Path, *, timeout_s: float, poll: Callable[[], bool]) -> Iterator[Wait]:
    """Hold the lock file `path` for the body, or give up after `timeout_s` seconds.

    Never raises for a lock that cannot be had: after the timeout it warns once, naming the holder;
    where no lock file can be made (read-only directory, full disk) it yields at once.

    Parameters
    ----------
    path
        The lock file. ``<path>.holder`` beside it says who holds it.
    timeout_s
        Longest wait in seconds, threads of this process included.
    poll
        Called while waiting; true ends the wait because the work has been done meanwhile.
    """
    start = time.monotonic()
    wait = Wait()
    with _thread_lock(path, timeout_s) as thread_held:
        wait.waited_ms = (time.monotonic() - start) * 1e3
        if not thread_held:
            _warn_held(path, timeout_s, "another thread of this process")
            yield wait
            return
        with _file_lock(path, start, timeout_s, poll, wait):
            yield wait


@contextmanager
def _thread_lock(path: Path, timeout_s: float) -> Iterator[bool]:
    with _thread_locks_guard:
        lock = _thread_locks.setdefault(str(path), threading.Lock())
    # threading refuses timeouts above about 292 years; a day is as good as forever.
    held = lock.acquire(timeout=min(timeout_s, 86_400.0))
    try:
        yield held
    finally:
        if held:
            lock.release()


@contextmanager
def _file_lock(
    path: Path, start: float, timeout_s: float, poll: Callable[[], bool], wait: Wait
) -> Iterator[None]:
    # Imported here: it costs 37 ms, and a warm load never comes this far.
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path))
    except OSError:
        yield  # no directory to lock in: the caller builds privately and warns about it
        return
    pause_s = _FIRST_POLL_S
    first_try = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=0)
            wait.held = True
            break
        except Timeout:
            pass
        except (OSError, NotImplementedError):
            break  # read-only, full, or a file system without locks
        if poll():
            wait.satisfied = True
            break
        if time.monotonic() - start >= timeout_s:
            _warn_held(path, timeout_s, str(read_holder(path) or "an unknown process"))
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
    wait.waited_ms += (time.monotonic() - first_try) * 1e3
    if not wait.held:
        yield
        return
    try:
        _write_holder(path)
        yield
    finally:
        with suppress(OSError):  # a disk that has become read-only meanwhile
            _holder_path(path).unlink(missing_ok=True)
        lock.release()


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
