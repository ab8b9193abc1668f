"""Keeping a cache directory tidy: names of private files, what dead processes left, sizes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DEAD_S = 600.0  # pids of two containers may look alike, so even a dead one's files rest a while
_OLD_S = 86_400.0

_log = logging.getLogger("jitkern")
_serial = itertools.count()


def private_name() -> str:
    """Return a name that no other process or thread uses: ``<host>.<pid>.<number>.<time>``."""
    return f"{socket.gethostname()}.{os.getpid()}.{next(_serial)}.{time.time_ns():x}"


def sweep(folder: Path) -> None:
    """Delete what killed processes left in `folder` under private names."""
    host = socket.gethostname()
    for path in folder.iterdir():
        try:
            age_s = time.time() - path.stat().st_mtime
        except OSError:
            continue  # another process sweeps too, or it is somebody else's
        owner, _, rest = path.name.removeprefix(host + ".").partition(".")
        local = path.name.startswith(host + ".") and owner.isdigit() and bool(rest)
        dead = local and not Path("/proc", owner).exists()
        if age_s > _OLD_S or (dead and age_s > _DEAD_S):
            shutil.rmtree(path, ignore_errors=True)


def remove_if_empty(path: Path) -> None:
    """Remove directory `path` unless something is in it."""
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


@dataclass(frozen=True)
class NotedBytes:
    """A file that notes the size of a cache, so that not every meta has to be read to know it.

    Two processes may lose an addition between them: it is a note, not an account.
    """

    path: Path

    def read(self) -> int | None:
        """Return the size in bytes, or None where none is noted."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, total_bytes: int) -> None:
        """Note `total_bytes`, best effort."""
        partial = self.path.with_name(f"{self.path.name}.{private_name()}")
        try:
            partial.write_text(str(total_bytes))
            os.replace(partial, self.path)
        except OSError as error:
            _log.info("jitkern: cannot write %s: %s", self.path, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
