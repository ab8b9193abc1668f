"""Whose code may run here: one rule for every folder and file of a cache.

Loading a library runs its code. So a cache is used only if this user or root owns it and nobody
else may write it; else it counts as absent. The same holds for the folders above it, up to the home
directory: whoever may rename there can put another cache in its place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jitkern.env import Trust, settings
from jitkern.errors import CacheError

EVERYONE = Trust(everyone=True)


class UntrustedError(CacheError):
    """Others could have written a part of a cache; the message says what to type."""


def complaint(status: os.stat_result, trust: Trust, *, above: bool = False) -> str:
    """Return how others could have written a file with this status; empty if they could not.

    A folder `above` a cache may have a sticky bit instead, as ``/tmp`` has.
    """
    if trust.everyone:
        return ""
    mode, owner = status.st_mode, status.st_uid
    if not _may_own(owner, trust):
        return f"it belongs to uid {owner}"
    # With an umask of 002 each user has a group of his own, of the same number.
    by_group = mode & stat.S_IWGRP and status.st_gid != owner
    if (by_group or mode & stat.S_IWOTH) and not (above and mode & stat.S_ISVTX):
        return f"its mode, {stat.S_IMODE(mode):04o}, lets others write it"
    return ""


def written_by_others(status: os.stat_result) -> str:
    """Return the complaint about a file, given its fstat and JITKERN_CACHE_TRUST."""
    return complaint(status, settings().cache_trust)


def require_trusted(
    path: Path | str, status: os.stat_result, trust: Trust, *, above: bool = False
) -> None:
    """Raise UntrustedError if others could have written `path`, or if it is a link."""
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedError(f"{path}: a symbolic link, not followed in a cache; remove it")
    reason = complaint(status, trust, above=above)
    if not reason:
        return
    from shlex import quote

    is_foreign = not _may_own(status.st_uid, trust)
    if above:
        advice = "put the cache elsewhere" if is_foreign else f"chmod go-w {quote(str(path))}"
    else:
        command = f"chown -R {os.geteuid()}" if is_foreign else "chmod -R go-w"
        advice = f"{command} {quote(str(path))} if all in it is yours"
    trusted = status.st_uid if is_foreign else "everyone"
    raise UntrustedError(
        f"{path}: {reason}; {advice}, or set JITKERN_CACHE_TRUST={trusted} if you trust them"
    )


def check_folders(base: Path, trust: Trust, home: Path | None = None) -> bool:
    """Check the cache folder `base` and all above it, up to `home`; tell whether it is there.

    Raises UntrustedError if others could have written one of them.
    """
    top = "/" if home is None else os.path.realpath(home)
    way = [str(base)]  # of strings: Path takes three times as long
    while way[-1] not in ("/", top):
        way.append(os.path.dirname(way[-1]))
    for path in reversed(way):
        try:
            status = os.lstat(path)
        except OSError:  # missing, not readable, or below a file
            return False
        require_trusted(path, status, trust, above=path not in way[:2])
    return True


def _may_own(user: int, trust: Trust) -> bool:
    return user in (0, os.geteuid()) or user in trust.users
