"""Whose code may run here: owner and mode of every directory of a cache, down to the file.

A library runs code when it is loaded, and the checksum beside it is made by whoever has made the
library. So what is in a cache counts only where nobody but this user, root, and those whom
JITKERN_CACHE_TRUST names can have written it. As in sshd's StrictModes that goes for the
directories above a cache too, up to the home directory: who may rename there may put another cache
in its place.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path

from jitkern.env import Trust, settings
from jitkern.errors import CacheError
from jitkern.files import make_folders

_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_ACL = "system.posix_acl_access"
_ACL_USER, _ACL_GROUP_OWNER, _ACL_GROUP, _ACL_WRITE = 0x02, 0x04, 0x08, 0x02


class UntrustedError(CacheError):
    """Others can have written what is in a cache; the message says who, and what to do."""


class Place:
    """The directory of a cache: where it is, and whether it is only ours.

    Parameters
    ----------
    root
        It may be a symbolic link, to another disk say; what is below it may not.
    trust
        Who may write there beside this user and root.
    home
        No directory above this one is looked at; by default all are, up to ``/``.
    shared
        It is written for other users to read, and nothing is loaded from it: nobody is asked whose
        it is.
    """

    def __init__(
        self, root: Path, trust: Trust, home: Path | None = None, *, shared: bool = False
    ) -> None:
        self._root = root
        self.trust: Trust = Trust(everyone=True) if shared else trust
        self._home = home
        self._shared = shared
        self._verdict: tuple[int, str] | None = None
        self._warned = False

    @cached_property
    def base(self) -> Path:
        """The directory that holds the entries."""
        # Resolved once and for all: a link that is changed later leads nowhere new.
        return Path(os.path.realpath(self._root), "v1")

    def check(self) -> bool:
        """Tell whether there is a cache here. Looks once a process, and again while there is none.

        Raises
        ------
        UntrustedError
            Others can have written what is in it.
        """
        verdict = self._verdict
        user = os.geteuid()  # a server may change it when it has bound its port
        if verdict is None or verdict[0] != user:
            try:
                if not self._look():
                    return False
                verdict = (user, "")
            except UntrustedError as error:
                verdict = (user, str(error))
            self._verdict = verdict
        if verdict[1]:
            raise UntrustedError(verdict[1])
        return True

    def _look(self) -> bool:
        base, home, there = str(self.base), _identity(self._home), True
        on_the_way: list[tuple[str, os.stat_result]] = []
        for path in _from_the_top(base):
            status = _status(path)
            if status is None:
                there = False
                break
            if (status.st_dev, status.st_ino) == home:
                on_the_way.clear()
            on_the_way.append((path, status))
        inside = (os.path.dirname(base), base)
        for path, status in on_the_way:
            require_trusted(path, status, self.trust, above=path not in inside)
        return there

    def make(self, name: str = "") -> Path:
        """Make directory `name` of the place, and the place itself, where they are missing.

        Raises
        ------
        UntrustedError
            It is there, and others can write to it.
        OSError
            It cannot be made.
        """
        self.check()  # nothing is made below a directory that is not ours
        make_folders(self.base / name, self.mode)
        return self.folder(name)

    def folder(self, name: str) -> Path:
        """Return directory `name` of the place, whether it is there or not.

        Raises
        ------
        UntrustedError
            It is there, and others can write to it.
        """
        self.check()
        folder = self.base / name
        with suppress(FileNotFoundError):
            require_trusted(folder, os.lstat(folder), self.trust)
        return folder

    @property
    def mode(self) -> int:
        """Mode of the directories that are made here: closed, unless the place is shared.

        One whose root a group may write, and hands its group down, is that group's own.
        """
        if self._shared:
            return 0o755
        try:
            root = os.stat(self.base.parent).st_mode
        except OSError:
            return 0o700
        return 0o770 if root & stat.S_IWGRP and root & stat.S_ISGID else 0o700

    @property
    def file_mode(self) -> int:
        """Mode of the files of an entry, which are never written to again."""
        return self.mode & 0o644

    def rights(self) -> str:
        """Return ``owner alice, mode 0700``, or nothing where there is no directory."""
        try:
            return owner_and_mode(os.stat(self.base.parent))
        except OSError:
            return ""

    def warn(self, message: str) -> None:
        """Warn, but once a process and place."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"jitkern: {message}", RuntimeWarning, stacklevel=2)


def require_trusted(
    path: Path | str, status: os.stat_result, trust: Trust, *, above: bool = False
) -> None:
    """Raise UntrustedError where others can have written `path`, whose lstat or fstat is `status`.

    Parameters
    ----------
    above
        It is a directory above a cache: one with a sticky bit will do, such as ``/tmp``, where
        nobody can rename what is another's.
    """
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        raise UntrustedError(
            f"{path}: a symbolic link, which is not followed in a cache; remove it"
        )
    if status.st_uid in (0, os.geteuid()) and not mode & _WRITTEN_BY_OTHERS:
        return  # as it nearly always is: the rest may take its time
    owner, writers = _others(path, status, trust, above=above)
    if owner or writers:
        who = " and ".join([*owner, *writers])
        raise UntrustedError(
            f"{path} ({owner_and_mode(status)}): {who} can change what is in it; "
            + _advice(path, owner, writers, above)
        )


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
    if mode & _WRITTEN_BY_OTHERS and not (above and mode & stat.S_ISVTX):
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


def _from_the_top(path: str) -> list[str]:
    """Return each directory from ``/`` down to `path`. Of strings: Path takes thrice as long."""
    found = [path]
    while (above := os.path.dirname(path)) != path:
        found.append(path := above)
    return found[::-1]


def _status(path: str) -> os.stat_result | None:
    """What `path` is, but for what is not made yet, closed to us, or a file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    is_a_way = stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)
    return status if is_a_way else None


def _identity(path: Path | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


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
