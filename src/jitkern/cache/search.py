"""Which caches this process has: the order they are searched in, and the one that is written."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.cache.entry import Entry, Key
from jitkern.cache.shelf import Shelf
from jitkern.cache.stats import Source
from jitkern.cache.trust import UntrustedError
from jitkern.env import NOBODY, Settings, Trust, settings
from jitkern.errors import CacheError
from jitkern.fs import ForkLocal

if TYPE_CHECKING:
    from jitkern.cache.store import Cache

SHIPPED = Path(__file__).resolve().parent.parent / "_prebuilt"

KERNELS = "jitkern-kernels"
"""The wheel of prebuilt kernels, which one may install beside jitkern."""

# Stands for ~/.cache where there is no home directory: nothing can be made below it.
_NOWHERE = Path(os.devnull, "no-home")

# What names it, what stats() calls a hit in it, where it is.
_Searched = tuple[str, Source, Shelf]


@lru_cache(maxsize=4)
def _shelves(current: Settings) -> tuple[_Searched, ...]:
    home_is_missing = current.cache_dir.parts[:1] == ("~",)
    user = Shelf(
        _NOWHERE if home_is_missing else current.cache_dir,
        trust=current.cache_trust,
        home=current.home,
    )
    shared = (
        Shelf(path, read_only=True, trust=current.cache_trust, home=current.home)
        for path in current.cache_path
    )
    return (
        *(("JITKERN_CACHE_PATH", "cached", shelf) for shelf in shared),
        ("JITKERN_CACHE_DIR", "cached", user),
        ("shipped", "shipped", _shipped()),
    )


def _shipped() -> Shelf:
    """Return the cache in this package, trusted as far as the Python files beside it are."""
    return Shelf(SHIPPED, read_only=True, trust=_trust_of_package(), home=SHIPPED.parent)


@lru_cache(maxsize=1)
def _kernels() -> tuple[_Searched, ...]:
    """Return the cache that the wheel of kernels is, where Python would import it from, if any.

    Nothing of it is imported. It may belong to whom this package may belong to.
    """
    # 25 to 50 us, once a process and only where no other cache has what is wanted.
    # importlib.util.find_spec would ask the finders of others too, who may raise what they like.
    spec = PathFinder.find_spec(KERNELS.replace("-", "_"))
    if spec is None or spec.origin is None:
        return ()
    folder = Path(spec.origin).parent
    shelf = Shelf(folder, read_only=True, trust=_trust_of_package(), home=folder)
    return ((KERNELS, "shipped", shelf),)


def _trust_of_package() -> Trust:
    try:
        status = SHIPPED.parent.stat()
    except OSError:  # closed to the user that this process has become since its imports
        return NOBODY
    groups = {status.st_gid} if status.st_mode & stat.S_IWGRP else set()
    everyone = bool(status.st_mode & stat.S_IWOTH)
    return Trust(frozenset({status.st_uid}), frozenset(groups), everyone)


class Searched(NamedTuple):
    """A cache that is searched: what names it, what stats() calls a hit in it."""

    origin: str
    source: Source
    cache: Cache


def caches() -> tuple[Searched, ...]:
    """Return the caches of this process in the order they are searched in."""
    found = (*_shelves(settings()), *_kernels())
    return tuple(Searched(origin, source, _whole(shelf)) for origin, source, shelf in found)


def folders() -> list[Path]:
    """Return where the caches of this process are, in the same order."""
    return [shelf.root for _, _, shelf in (*_shelves(settings()), *_kernels())]


def user_cache() -> Cache:
    """Return the cache at JITKERN_CACHE_DIR: the one that is written."""
    return _whole(_user_shelf())


def _user_shelf() -> Shelf:
    return _shelves(settings())[-2][2]


@lru_cache(maxsize=32)
def _whole(shelf: Shelf) -> Cache:
    from jitkern.cache.store import Cache  # a look-up has no need of it

    is_written = shelf is _user_shelf()
    return Cache.of(shelf, settings().cache_max_bytes if is_written else None)


def search(
    key: Key,
    variant: str = "",
    accepts: Callable[[Mapping[str, Any]], bool] | None = None,
    suits: Callable[[Mapping[str, Any]], bool] | None = None,
    prefers: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Iterator[tuple[Source, Entry]]:
    """Look up `key` in every cache, in order: yields the entry of each that has one.

    What is shipped may be of another variant than the one that is asked for, if it `suits`. Where
    any variant is asked for, each cache gives its newest of those that are preferred, if it has
    one.
    """
    for source, shelf in _in_order():
        try:
            entry = shelf.lookup(key, variant, accepts, prefers)
            if entry is None and source == "shipped" and variant and suits is not None:
                entry = shelf.lookup(key, "", suits)
        except UntrustedError as error:
            _skip(shelf, error)
            continue
        if entry is not None:
            yield source, entry


def _in_order() -> Iterator[tuple[Source, Shelf]]:
    *first, shipped = ((source, shelf) for _, source, shelf in _shelves(settings()))
    yield from first
    own = _private.value.cache
    if own is not None:
        yield "cached", own
    yield shipped
    yield from ((source, shelf) for _, source, shelf in _kernels())


def shipped_cache() -> Shelf:
    """Return what the wheel has brought."""
    return _shelves(settings())[-1][2]


def _skip(shelf: Shelf, reason: UntrustedError) -> None:
    """Do without a cache that others can have written, and say so once."""
    if shelf is _user_shelf():
        private_cache(reason)  # says where it writes instead
    else:
        shelf.place.warn(f"this cache is not searched: {reason}")


def private_cache(reason: CacheError) -> Cache | None:
    """Return a temporary cache of this process's own, because of `reason`; warn once.

    None where not even a temporary directory can be made.
    """
    if _user_shelf().root == _NOWHERE:
        reason = CacheError("there is no home directory; set HOME or JITKERN_CACHE_DIR")
    return _private.value.get(reason)


class _PrivateCache:
    """The temporary directory of this process for when the cache cannot be written."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self._warned = False
        self._guard = threading.Lock()

    def get(self, reason: CacheError) -> Cache | None:
        # Imported here: seldom needed.
        from jitkern.cache.store import Cache
        from jitkern.fs import make_scratch_folder

        with self._guard:
            if self.cache is None:
                try:
                    root = make_scratch_folder("cache")
                except OSError:
                    self._warn(f"{reason}; nothing compiled by this process is kept")
                    return None
                self.cache = Cache(root, home=root)
                atexit.register(_remove, root, os.getpid())
            root = self.cache.root
            self._warn(f"{reason}; this process keeps what it compiles in {root} until it ends")
            return self.cache

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"jitkern: {message}", RuntimeWarning, stacklevel=2)


def _remove(root: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        shutil.rmtree(root, ignore_errors=True)


# Anew in a forked child: the parent removes its directory when it ends, which may be before that.
_private = ForkLocal(_PrivateCache)
