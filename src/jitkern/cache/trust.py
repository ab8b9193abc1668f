"""The trust rule: a cache is used if this user or root owns it and nobody else may write it.

Loading a library runs its code. The rule covers the cache's folder and the folders above it, up to
the home directory: whoever may rename there can put another cache in its place. Everything below
that folder is made for this user alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shlex import quote

from jitkern.errors import CacheError


class UntrustedError(CacheError):
    """Others could have written a cache; the message says what to type."""


def written_by_others(status: os.stat_result, *, above: bool = False) -> str:
    """Return how others could have written a file with this status; empty if they could not.

    A folder `above` a cache may have a sticky bit instead, as ``/tmp`` has.
    """
    mode, owner = status.st_mode, status.st_uid
    if owner not in (0, os.geteuid()):
        return f"it belongs to uid {owner}"
    # Under umask 002 each user has a group of their own, with the same number.
    by_group = mode & stat.S_IWGRP and status.st_gid != owner
    if (by_group or mode & stat.S_IWOTH) and not (above and mode & stat.S_ISVTX):
        return f"its mode, {stat.S_IMODE(mode):04o}, lets others write it"
    return ""


def check_folders(base: Path, home: Path | None = None) -> bool:
    """Check the cache folder `base` and all above it, up to `home`; tell whether it is there.

    Raises UntrustedError if others could have written one of them.
    """
    top = "/" if home is None else os.path.realpath(home)
    paths = [str(base)]  # strings: Path takes three times as long
    while paths[-1] not in ("/", top):
        paths.append(os.path.dirname(paths[-1]))
    for path in reversed(paths):
        try:
            status = os.stat(path)
        except OSError:  # missing, not readable, or below a file
            return False
        if not stat.S_ISDIR(status.st_mode):
            return False  # whoever makes the cache is told so
        above = path not in paths[:2]
        if reason := written_by_others(status, above=above):
            raise UntrustedError(f"{path}: {reason}; {_advice(path, status, above)}")
    return True


def _advice(path: str, status: os.stat_result, above: bool) -> str:
    is_foreign = status.st_uid not in (0, os.geteuid())
    if above:
        return "put the cache elsewhere" if is_foreign else f"chmod go-w {quote(path)}"
    command = f"chown -R {os.geteuid()}" if is_foreign else "chmod -R go-w"
    return f"{command} {quote(path)} if all in it is yours"
