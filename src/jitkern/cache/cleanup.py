"""Deleting from a cache directory: what is the cache's own, and nothing else.

JITKERN_CACHE_DIR may name any directory, and one that is shared may be changed meanwhile. So a
directory is opened once, with no symbolic link followed below the root, and what is deleted is
named relative to it. Nothing here descends: there is no directory inside an entry.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from jitkern.cache.schema import META_MAX_BYTES, META_NAME, parse_meta
from jitkern.errors import CacheError
from jitkern.fs import (
    is_abandoned,
    is_safe_name,
    open_itself,
    private_name,
    read_regular,
    write_whole,
)

STAGING, LOCKS, FAILED = ".staging", ".locks", ".failed"

TAG_NAME = "CACHEDIR.TAG"
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n"  # https://bford.info/cachedir/
_TAG = (
    _SIGNATURE + b"# This directory is a cache of kernels compiled by jitkern: a backup need not\n"
    b"# have it. See https://bford.info/cachedir/\n"
)
_MAX_TAG_BYTES = 4096

# Patterns, to be compiled when they are needed: a warm load does without.
_KEY = r"[A-Za-z0-9_+][A-Za-z0-9_.+-]{0,79}-[0-9a-f]{20}\Z"

# What else there is; the second line is what is being written, or was noted by older versions.
_BESIDE = (
    r"\.staging\Z|\.locks\Z|\.failed\Z|CACHEDIR\.TAG\Z"
    r"|\.CACHEDIR\.TAG\.|\.bytes\Z|\.\.bytes\."
)
_ARTEFACTS = (".cubin", ".ptx", ".so")


class Found(NamedTuple):
    """A directory in the place of an entry, of the size that its files have."""

    key: str
    variant: str
    bytes: int
    last_used_unix_s: float

    def __str__(self) -> str:
        return f"{self.key}/{self.variant}"


@contextmanager
def opened(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """Hold the descriptor of a directory; OSError where `path` is a link or something else."""
    descriptor = open_itself(path, os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- looking ---------------------------------------------------------------------------------------


def survey(base: int) -> Iterator[Found]:
    """Find all that has the place and the name of an entry below the descriptor `base`, by name.

    Reads no file: 1,000 entries take 30 ms, a third of what reading every meta would.
    """
    for key in sorted(_directories(base)):
        if not _is_key(key):
            continue
        with suppress(OSError), opened(key, base) as folder:  # evicted meanwhile, or closed to us
            for variant in sorted(filter(is_safe_name, _directories(folder))):
                with suppress(OSError):
                    yield _measured(folder, key, variant)


def _is_key(name: str) -> bool:
    return re.match(_KEY, name) is not None


def _directories(descriptor: int) -> list[str]:
    with os.scandir(descriptor) as items:
        return [item.name for item in items if item.is_dir(follow_symlinks=False)]


def _measured(folder: int, key: str, variant: str) -> Found:
    size_bytes, last_used_unix_s = 0, 0.0
    with opened(variant, folder) as inside, os.scandir(inside) as items:
        for item in items:
            status = item.stat(follow_symlinks=False)
            size_bytes += status.st_size
            if item.name == META_NAME:
                last_used_unix_s = status.st_mtime
    return Found(key, variant, size_bytes, last_used_unix_s)


def strange_part(base: int, key: str, variant: str) -> str:
    """Name what is in an entry's place and no part of one; empty where all is the cache's own."""
    with opened(key, base) as folder, opened(variant, folder) as inside:
        with os.scandir(inside) as items:
            names = {item.name: item.is_file(follow_symlinks=False) for item in items}
        recorded: dict[str, object] = {META_NAME: None}
        with suppress(OSError, CacheError):  # damaged: the names are all there is to go by
            raw = read_regular(META_NAME, META_MAX_BYTES, dir_fd=inside)
            recorded |= parse_meta(raw, META_NAME)["files"]
    for name, is_file in sorted(names.items()):
        if not is_file or (name not in recorded and PurePath(name).suffix not in _ARTEFACTS):
            return f"{key}/{variant}/{name}"
    return ""


def strangers(base: int) -> list[str]:
    """List what lies beside the entries and is not the cache's own, such as ``notes.txt``."""
    found = []
    keys = set(filter(_is_key, _directories(base)))
    for name in os.listdir(base):
        if name in keys:
            with suppress(OSError), opened(name, base) as folder:
                variants = set(filter(is_safe_name, _directories(folder)))
                others = set(os.listdir(folder)) - variants
                found += [f"{name}/{other}" for other in others]
        elif not re.match(_BESIDE, name):
            found.append(name)
    return sorted(found)


# -- the tag ---------------------------------------------------------------------------------------


def is_tagged(base: int) -> bool:
    """Tell whether jitkern has marked this directory as a cache of its own."""
    try:
        text = read_regular(TAG_NAME, _MAX_TAG_BYTES, dir_fd=base)
    except OSError:
        return False
    return text.startswith(_SIGNATURE) and b"jitkern" in text


def tag(path: Path, mode: int | None = None) -> None:
    """Mark the directory `path`, unless it is marked or has something in it that is not jitkern's.

    Backup tools leave out what is marked: with somebody's files in it that would be their loss.

    Parameters
    ----------
    mode
        Of the tag, as for :func:`jitkern.fs.write_new`.
    """
    with opened(path) as base:
        if is_tagged(base) or strangers(base):
            return
    write_whole(path / TAG_NAME, _TAG, mode=mode)


# -- deleting --------------------------------------------------------------------------------------


class Cleared(NamedTuple):
    """What has been removed, and what was left alone because it is not the cache's own."""

    removed: list[str]
    left: list[str]


def clear(base: int, path: Path, *, only: Container[str] | None = None, dry_run: bool) -> Cleared:
    """Remove every entry below the descriptor `base` of `path`, and the records of failures.

    With `only`, just the entries that it names.

    Raises
    ------
    CacheError
        There is something to remove, and jitkern has not marked the directory as its own.
    OSError
        Something cannot be deleted.
    """
    if not is_tagged(base):
        _refuse_untagged(base, path)
    cleared = Cleared([], [])
    for found in list(survey(base)):
        if only is not None and str(found) not in only:
            continue
        with suppress(FileNotFoundError):  # evicted meanwhile
            strange = strange_part(base, found.key, found.variant)
            if strange:
                cleared.left.append(strange)
                continue
            if not dry_run:
                remove(base, found)
            cleared.removed.append(str(found))
    if only is not None:
        return cleared
    cleared.left.extend(strangers(base))
    if not dry_run:
        _forget_failures(base)
    return cleared


def _refuse_untagged(base: int, path: Path) -> None:
    strange = next(iter(strangers(base)), None)
    if strange is not None:
        raise CacheError(
            f"{path}: not cleared, for it holds {strange!r}, which jitkern has not written, and no "
            f"{TAG_NAME} of jitkern's; if JITKERN_CACHE_DIR is right, move that elsewhere, or "
            "delete the entries by hand"
        )
    if next(survey(base), None) is not None:
        raise CacheError(
            f"{path}: not cleared, for it holds no {TAG_NAME} of jitkern's: an older version has "
            "made it; compile anything into it, which marks it, or delete it by hand"
        )


def remove(base: int, found: Found) -> None:
    """Discard an entry, and its key's directory if it was the last variant.

    Raises
    ------
    CacheError
        Something in it is not the cache's own; nothing has been deleted.
    OSError
        It cannot be deleted.
    """
    strange = strange_part(base, found.key, found.variant)
    if strange:
        raise CacheError(f"{strange}: not written by jitkern; left alone")
    discard(base, found.key, found.variant)
    try:
        os.rmdir(found.key, dir_fd=base)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def discard(base: int, key: str, variant: str) -> None:
    """Take what is in an entry's place out of sight in one step; delete what is the cache's own.

    What is not stays in the staging directory, under a name that sweep() leaves alone.
    """
    try:
        own = not strange_part(base, key, variant)
    except FileNotFoundError:
        return  # another process was faster
    except OSError:
        own = False  # a file or a link
    doomed = private_name() if own else f"not-of-jitkern-{os.urandom(8).hex()}"
    with suppress(FileExistsError):
        os.mkdir(STAGING, 0o700, dir_fd=base)
    with opened(STAGING, base) as staging:
        with suppress(FileNotFoundError), opened(key, base) as folder:
            os.rename(variant, doomed, src_dir_fd=folder, dst_dir_fd=staging)
        if own:
            with suppress(OSError):  # out of sight it is: sweep() tries again
                _delete(doomed, staging)


def _forget_failures(base: int) -> None:
    """Delete the records of failed builds."""
    with suppress(FileNotFoundError), opened(FAILED, base) as folder:
        for name in os.listdir(folder):
            key, ending = name[:-5], name[-5:]
            if ending == ".json" and _is_key(key):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)


def sweep(base: int) -> None:
    """Delete what killed processes left under private names."""
    for place in (STAGING, LOCKS, FAILED):
        with suppress(OSError), opened(place, base) as folder:
            for name in os.listdir(folder):
                with suppress(OSError):  # another process sweeps too, or it is somebody else's
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if is_abandoned(name, time.time() - status.st_mtime):
                        _delete(name, folder)


def _delete(name: str, folder: int) -> None:
    """Delete a file, a link, or a directory that has no directory in it."""
    try:
        with opened(name, folder) as inside:
            if _directories(inside):
                raise OSError(errno.ENOTEMPTY, "has a directory in it", name)
            for file in os.listdir(inside):
                os.unlink(file, dir_fd=inside)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=folder)
        return
    os.rmdir(name, dir_fd=folder)
