"""Who else can have written a file or a directory: owners, groups and access lists by name.

Nearly always nobody can, which `trust` sees from owner and mode alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from jitkern.env import Trust, settings

_ACL = "system.posix_acl_access"
_ACL_USER, _ACL_GROUP_OWNER, _ACL_GROUP, _ACL_WRITE = 0x02, 0x04, 0x08, 0x02


def complaint(path: Path | str, status: os.stat_result, trust: Trust, *, above: bool) -> str:
    """Say who can have written `path`, and what to do; empty where nobody can.

    See :func:`jitkern.cache.trust.require_trusted`.
    """
    owner, writers = _others(path, status, trust, above=above)
    if not owner and not writers:
        return ""
    who = " and ".join([*owner, *writers])
    advice = _advice(path, owner, writers, above)
    return f"{path} ({owner_and_mode(status)}): {who} can change what is in it; {advice}"


def written_by_others(path: Path, status: os.stat_result) -> str:
    """Say who could have written a file beside this user, root, and whom JITKERN_CACHE_TRUST names.

    Empty where nobody could. `status` is the file's fstat.
    """
    owner, writers = _others(path, status, settings().cache_trust)
    if owner:
        return f"it belongs to {owner[0]}"
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    return f"its mode, {mode}, lets {' and '.join(writers)} write it" if writers else ""


def owner_and_mode(status: os.stat_result) -> str:
    """Return ``owner alice, mode 0700``."""
    return f"owner {_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"


def _others(
    path: Path | str, status: os.stat_result, trust: Trust, *, above: bool = False
) -> tuple[list[str], list[str]]:
    """Name the owner, if it is a stranger, and the strangers who may write."""
    if trust.everyone:
        return [], []
    mode = status.st_mode
    owner = [] if _may_own(status.st_uid, trust) else [_user(status.st_uid)]
    writers = []
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (above and mode & stat.S_ISVTX):
        writers = _writers(path, status, trust)
    return owner, writers


def _advice(path: Path | str, owner: list[str], writers: list[str], above: bool) -> str:
    from shlex import quote

    if above:
        advice = "put the cache elsewhere" if owner else f"chmod go-w {quote(str(path))}"
    else:
        commands = [f"chown -R {_user(os.geteuid())} {quote(str(path))}"] if owner else []
        commands += [f"chmod -R go-w {quote(str(path))}"] if writers else []
        advice = f"{' && '.join(commands)} if all in it is yours"
    if "everyone" not in writers:
        advice += f", or set JITKERN_CACHE_TRUST={','.join([*owner, *writers])} if you trust them"
    return advice


def _writers(path: Path | str, status: os.stat_result, trust: Trust) -> list[str]:
    """Name who may write to `path` by its mode or its access list, beside those who may own it."""
    if status.st_mode & stat.S_IWOTH:
        return ["everyone"]
    found = []
    for tag, number in _granted(path, status):
        if tag == _ACL_USER and not _may_own(number, trust):
            found.append(_user(number))
        elif tag != _ACL_USER and not _may_write(number, status.st_uid, trust):
            found.append(f"group:{_group(number)}")
    return found


def _granted(path: Path | str, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """Yield (kind, number) of each user and group that may write to `path`.

    Of a file with an access list the group's bits are its mask, without which it grants nothing:
    where they do not say "write", nobody has to look here.
    """
    import struct

    try:
        entries = os.getxattr(path, _ACL, follow_symlinks=False)[4:]  # behind a version
    except OSError:
        entries = b""  # none, or a file system that has none
    if not entries:
        yield _ACL_GROUP_OWNER, status.st_gid
    for tag, rights, number in struct.iter_unpack("<HHI", entries):
        if rights & _ACL_WRITE and tag == _ACL_GROUP_OWNER:
            yield tag, status.st_gid
        elif rights & _ACL_WRITE and tag in (_ACL_USER, _ACL_GROUP):
            yield tag, number


def _may_own(user: int, trust: Trust) -> bool:
    if user in (0, os.geteuid()) or user in trust.users:
        return True
    return bool(trust.groups and trust.groups & _groups_of(user))


def _may_write(group: int, owner: int, trust: Trust) -> bool:
    return group in trust.groups or group == _private_group(owner)


@lru_cache(maxsize=64)
def _groups_of(user: int) -> frozenset[int]:
    import pwd

    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


@lru_cache(maxsize=64)
def _private_group(user: int) -> int | None:
    """Return the group that is this user's alone, where there is one.

    Debian, Ubuntu and Fedora give each user a group of his own name, and some of them an umask of
    002 with it: what such a group may write, nobody else may. Debian's sshd sees it that way, too.
    """
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(user)
        group = grp.getgrgid(owner.pw_gid)
    except KeyError:
        return None
    others = any(one.pw_gid == owner.pw_gid and one.pw_uid != user for one in pwd.getpwall())
    alone = not set(group.gr_mem) - {owner.pw_name} and not others
    return owner.pw_gid if alone and group.gr_name == owner.pw_name else None


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
