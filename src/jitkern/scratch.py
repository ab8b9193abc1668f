"""Temporary directories, and those that killed processes have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jitkern.errors import CacheError
from jitkern.files import open_itself
from jitkern.writing import is_abandoned, make_folders, private_name

_PREFIX = "jitkern-"

# A killed compiler may outlive its process for a while.
_DEAD_S = 3600.0


def make_scratch_folder(purpose: str) -> Path:
    """Make a directory of this user's own: ``jitkern-<purpose>-...`` in TMPDIR.

    It is this process's until it ends. Those of processes that were killed are deleted first; a
    deletion that fails is no error.
    """
    folder, _ = _make(purpose)  # the lock goes with the process
    return folder


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Make a directory as :func:`make_scratch_folder` does, for the body only."""
    folder, descriptor = _make(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def require_writable(directory: Path, hint: str, mode: int = 0o700) -> None:
    """Raise CacheError unless files can be made in `directory`, created with `mode` if needed.

    By making one: what the mode bits say is not the truth for root, on a read-only mount or on a
    full disk.
    """
    try:
        make_folders(directory, mode)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".jitkern-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise CacheError(f"{directory}: cannot be written: {error.strerror}; {hint}") from error


def _make(purpose: str) -> tuple[Path, int]:
    """Make a directory and lock it; return the descriptor that holds the lock too."""
    above = Path(tempfile.gettempdir())
    _sweep(above)
    folder = above / f"{_PREFIX}{purpose}-.{private_name()}"
    folder.mkdir(mode=0o700)
    descriptor = _open(folder)
    with suppress(OSError):  # NFS locks no directory; there none is swept
        _lock(descriptor)
    return folder, descriptor


def _open(folder: str | Path) -> int:
    return open_itself(folder, os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(descriptor: int) -> None:
    """Lock what a process keeps as long as it lives.

    A lock and not its pid or an age: a server runs for weeks, and pods that share /tmp and the
    host's name need not see each other's processes.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sweep(above: Path) -> None:
    with suppress(OSError), os.scandir(above) as items:
        for item in items:
            if not item.name.startswith(_PREFIX):
                continue
            with suppress(OSError):  # gone meanwhile
                status = item.stat(follow_symlinks=False)
                own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if own and is_abandoned(item.name, time.time() - status.st_mtime, _DEAD_S):
                    descriptor = _open(item.path)
                    try:
                        _lock(descriptor)
                        # It refuses a link, and looks again at what it has opened.
                        shutil.rmtree(item.path, ignore_errors=True)
                    finally:
                        os.close(descriptor)
