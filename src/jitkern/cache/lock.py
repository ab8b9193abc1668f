"""One build per key and node: a file lock with a bounded wait that names its holder.

A process that waited for a build that failed is given that failure instead of failing once more.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.cache.entry import is_time
from jitkern.errors import CompileError
from jitkern.fs import make_folders, parse_json, read_regular, write_whole

_POLL_S = 0.01
_FOREVER_S = 86_400.0  # threading refuses timeouts above about 292 years

_FRESH_S = 10.0  # ranks of one job start within seconds; a person who tries again is slower
_MAX_FAILURE_BYTES = 16 << 20  # nvcc's log of a failed template may have some MB


@dataclass
class Wait:
    """How waiting for a build lock ended: if it is not held, build privately."""

    held: bool = False
    waited_ms: float = 0.0


@contextmanager
def build_lock(
    path: Path, *, timeout_s: float, done: Callable[[], bool], mode: int = 0o600
) -> Iterator[Wait]:
    """Hold the lock file `path` for the body, or give up after `timeout_s` seconds.

    Never raises if the lock cannot be had: after the timeout it warns and names the holder, on a
    read-only or full disk it yields at once. `done` ends the wait: there is nothing left to build.
    """
    # Imported here: it costs 37 ms, and a warm load never comes this far.
    from filelock import FileLock, Timeout

    # Soft locks outlive a holder that is killed: a file system without locks is to be an OSError.
    lock = FileLock(path, fallback_to_soft=False, mode=mode)
    start = time.monotonic()
    wait = Wait()
    try:
        make_folders(path.parent)
        if not path.parent.is_symlink():  # a link would have files made somewhere else
            lock.acquire(min(timeout_s, _FOREVER_S), _POLL_S, cancel_check=done)
            wait.held = True
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = f"pid {os.getpid()} on {os.uname().nodename} since {since}"
            write_whole(_holder_path(path), holder.encode())
    except Timeout:
        if not done():
            holder = read_holder(path) or "an unknown process"
            warnings.warn(
                f"jitkern: the build lock {path} was still held by {holder} after {timeout_s:g} s "
                "(JITKERN_LOCK_TIMEOUT_S); compiling privately",
                RuntimeWarning,
                stacklevel=3,
            )
    except OSError:
        pass  # the caller builds without the lock, and the publication says why nothing is kept
    wait.waited_ms = (time.monotonic() - start) * 1e3
    try:
        yield wait
    finally:
        if wait.held:
            with suppress(OSError):  # a disk that has become read-only meanwhile
                _holder_path(path).unlink(missing_ok=True)
            lock.release()


def read_holder(path: Path) -> str:
    """Return who says to hold the lock file `path`; empty if nobody does."""
    try:
        text = read_regular(_holder_path(path), 400).decode()
    except (OSError, ValueError):
        return ""
    return text if text.isprintable() else ""


def _holder_path(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


@dataclass(frozen=True)
class FailureNote:
    """The file that keeps one key's last failure, so that many ranks report one."""

    path: Path

    def write(self, error: CompileError, inputs: str) -> None:
        """Note `error` for a build of `inputs` (a digest). Best effort: others then build too."""
        texts = {"message": error.message, "command": error.command, "log": error.log}
        note = {"at_unix_s": time.time(), "inputs": inputs, "source": error.source or "", **texts}
        with suppress(OSError):
            make_folders(self.path.parent)
            if not self.path.parent.is_symlink():
                write_whole(self.path, json.dumps(note).encode())

    def recent(self, inputs: str, since_unix_s: float) -> CompileError | None:
        """Return the failure of a build of the same `inputs`, noted since 10 s before that time."""
        try:
            note = parse_json(read_regular(self.path, _MAX_FAILURE_BYTES))
        except (OSError, ValueError):
            return None
        texts = ("inputs", "message", "command", "log", "source")
        if not isinstance(note, dict) or any(type(note.get(name)) is not str for name in texts):
            return None
        at_unix_s: Any = note.get("at_unix_s")
        if note["inputs"] != inputs or not is_time(at_unix_s):
            return None
        # One of the future does not count: a clock was wrong.
        if not since_unix_s - _FRESH_S <= at_unix_s <= time.time() + _FRESH_S:
            return None
        command, log, source = note["command"], note["log"], note["source"] or None
        return CompileError(note["message"], command=command, log=log, source=source)

    def forget(self) -> None:
        """Remove the note: the key has been built."""
        with suppress(OSError):  # it grows stale by itself
            if not self.path.parent.is_symlink():
                self.path.unlink()
