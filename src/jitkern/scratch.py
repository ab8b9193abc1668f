"""Temporary directories, and those that killed processes have left."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jitkern.errors import CacheError
from jitkern.files import is_abandoned, make_folders, private_name

_PREFIX = "jitkern-"

# A compiler may write nothing for a long time, and its process may be of another container.
_DEAD_S = 3600.0


def make_scratch_folder(purpose: str) -> Path:
    """Make a directory of this user's own: ``jitkern-<purpose>-...`` in TMPDIR.

    Those of processes that were killed are deleted first. A deletion that fails is no error.
    """
    above = Path(tempfile.gettempdir())
    _sweep(above)
    folder = above / f"{_PREFIX}{purpose}-.{private_name()}"
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Make a directory as :func:`make_scratch_folder` does, for the body only."""
    folder = make_scratch_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _sweep(above: Path) -> None:
    with suppress(OSError), os.scandir(above) as items:
        for item in items:
            if not item.name.startswith(_PREFIX):
                continue
            with suppress(OSError):  # gone meanwhile
                status = item.stat(follow_symlinks=False)
                own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if own and is_abandoned(item.name, time.time() - status.st_mtime, _DEAD_S):
                    # It refuses a link, and looks again at what it has opened.
                    shutil.rmtree(item.path, ignore_errors=True)
