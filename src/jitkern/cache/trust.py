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
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from jitkern.env import Trust
from jitkern.errors import CacheError

_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
        from jitkern.fs import make_folders  # a look-up makes none

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
        from jitkern.cache.strangers import owner_and_mode

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
    is_closed = not mode & _WRITTEN_BY_OTHERS or (above and mode & stat.S_ISVTX)
    if is_closed and status.st_uid in (0, os.geteuid()):
        return  # as it nearly always is: the rest may take its time
    from jitkern.cache.strangers import complaint

    reason = complaint(path, status, trust, above=above)
    if reason:
        raise UntrustedError(reason)


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
