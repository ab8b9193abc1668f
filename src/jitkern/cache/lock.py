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
from pathlib import Path
from typing import NamedTuple

from jitkern.cache import stats
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.fs import open_regular, parse_json, scratch_folder, write_whole

_POLL_S = 0.01
_FRESH_S = 10.0  # ranks of one job start within seconds; a person who tries again is slower
_MAX_FAILURE_BYTES = 16 << 20  # nvcc's log of a failed template may have some MB


@contextmanager
def build_lock(
    path: Path, *, timeout_s: float, done: Callable[[], bool], mode: int = 0o600
) -> Iterator[bool]:
    """Hold the lock file `path` for the body; yield whether it is held.

    Without the lock the caller builds privately. That is so after `timeout_s` seconds, with a
    warning that names the holder, at once on a read-only or full disk, and when `done` ends the
    wait: there is nothing left to build.
    """
    # Imported here: it costs 37 ms, and a warm load never comes this far.
    from filelock import FileLock, Timeout

    # A soft lock would outlive a killed holder; without it, no file locks means OSError.
    lock = FileLock(path, fallback_to_soft=False, mode=mode)
    holder_file = Path(f"{path}.holder")
    held, start = False, time.monotonic()
    try:
        lock.acquire(timeout_s, _POLL_S, cancel_check=done)
        held = True
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"pid {os.getpid()} on {os.uname().nodename} since {since}"
        write_whole(holder_file, holder.encode())
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
        pass  # the caller builds without the lock; publishing will warn if nothing can be kept
    if time.monotonic() - start > 1e-3:
        stats.count("waits")
    try:
        yield held
    finally:
        if held:
            with suppress(OSError):  # a disk that has become read-only meanwhile
                holder_file.unlink(missing_ok=True)
            lock.release()


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
        text = _read(Path(f"{path}.holder"), 400).decode()
    except (OSError, ValueError):
        return ""
    return text if text.isprintable() else ""


def _read(file: Path, max_bytes: int) -> bytes:
    with open(open_regular(file), "rb") as stream:
        return stream.read(max_bytes)


class FailureNote(NamedTuple):
    """The file that keeps one key's last failure, so that many ranks report one."""

    path: Path

    def write(self, error: CompileError, variant: str) -> None:
        """Note `error` for a build with `variant`. Best effort: without it others build too."""
        note = {"at_unix_s": time.time(), "variant": variant, "error": vars(error)}
        with suppress(OSError):
            write_whole(self.path, json.dumps(note).encode())

    def recent(self, variant: str, since_unix_s: float) -> CompileError | None:
        """Return the failure of a build with the same `variant`, since 10 s before that time."""
        try:
            note = parse_json(_read(self.path, _MAX_FAILURE_BYTES))
            # A time in the future comes from a wrong clock.
            is_fresh = since_unix_s - _FRESH_S <= note["at_unix_s"] <= time.time() + _FRESH_S
            is_same = note["variant"] == variant
            return CompileError(**note["error"]) if is_fresh and is_same else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def forget(self) -> None:
        """Remove the note: the key has been built."""
        with suppress(OSError):  # it grows stale by itself
            self.path.unlink()
