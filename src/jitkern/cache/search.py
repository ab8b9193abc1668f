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
from typing import Any, NamedTuple

from jitkern.cache.entry import Entry, Key
from jitkern.cache.stats import Source
from jitkern.cache.store import Cache
from jitkern.cache.trust import UntrustedError
from jitkern.env import NOBODY, Settings, Trust, settings
from jitkern.errors import CacheError
from jitkern.forks import PerProcess
from jitkern.scratch import make_scratch_folder

SHIPPED = Path(__file__).resolve().parent.parent / "_prebuilt"

KERNELS = "jitkern-kernels"
"""The wheel of prebuilt kernels, which one may install beside jitkern."""

# Stands for ~/.cache where there is no home directory: nothing can be made below it.
_NOWHERE = Path(os.devnull, "no-home")


class Searched(NamedTuple):
    """A cache that is searched: what names it, what stats() calls a hit in it."""

    origin: str
    source: Source
    cache: Cache


@lru_cache(maxsize=4)
def _caches(current: Settings) -> tuple[Searched, ...]:
    home_is_missing = current.cache_dir.parts[:1] == ("~",)
    user = Cache(
        _NOWHERE if home_is_missing else current.cache_dir,
        max_bytes=current.cache_max_bytes,
        trust=current.cache_trust,
        home=current.home,
    )
    shared = (
        Cache(path, read_only=True, trust=current.cache_trust, home=current.home)
        for path in current.cache_path
    )
    return (
        *(Searched("JITKERN_CACHE_PATH", "cached", cache) for cache in shared),
        Searched("JITKERN_CACHE_DIR", "cached", user),
        Searched("shipped", "shipped", _shipped()),
    )


def _shipped() -> Cache:
    """Return the cache in this package, trusted as far as the Python files beside it are."""
    return Cache(SHIPPED, read_only=True, trust=_trust_of_package(), home=SHIPPED.parent)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Searched, ...]:
    """Return the cache that the wheel of kernels is, where Python would import it from, if any.

    Nothing of it is imported. It may belong to whom this package may belong to.
    """
    # 25 to 50 us, once a process and only where no other cache has what is wanted.
    # importlib.util.find_spec would ask the finders of others too, who may raise what they like.
    spec = PathFinder.find_spec(KERNELS.replace("-", "_"))
    if spec is None or spec.origin is None:
        return ()
    folder = Path(spec.origin).parent
    cache = Cache(folder, read_only=True, trust=_trust_of_package(), home=folder)
    return (Searched(KERNELS, "shipped", cache),)


def _trust_of_package() -> Trust:
    try:
        status = SHIPPED.parent.stat()
    except OSError:  # closed to the user that this process has become since its imports
        return NOBODY
    groups = {status.st_gid} if status.st_mode & stat.S_IWGRP else set()
    everyone = bool(status.st_mode & stat.S_IWOTH)
    return Trust(frozenset({status.st_uid}), frozenset(groups), everyone)


def caches() -> tuple[Searched, ...]:
    """Return the caches of this process in the order they are searched in."""
    return (*_caches(settings()), *_kernels())


def user_cache() -> Cache:
    """Return the cache at JITKERN_CACHE_DIR: the one that is written."""
    return _caches(settings())[-2].cache


def search(
    key: Key,
    variant: str = "",
    accepts: Callable[[Mapping[str, Any]], bool] | None = None,
    suits: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Iterator[tuple[Source, Entry]]:
    """Look up `key` in every cache, in order: yields the entry of each that has one.

    What is shipped may be of another variant than the one that is asked for, if it `suits`.
    """
    for _, source, cache in _in_order():
        try:
            entry = cache.lookup(key, variant, accepts)
            if entry is None and source == "shipped" and variant and suits is not None:
                entry = cache.lookup(key, "", suits)
        except UntrustedError as error:
            _skip(cache, error)
            continue
        if entry is not None:
            yield source, entry


def _in_order() -> Iterator[Searched]:
    *first, shipped = _caches(settings())
    yield from first
    own = _private.value.cache
    if own is not None:
        yield Searched("private", "cached", own)
    yield shipped
    yield from _kernels()


def shipped_cache() -> Cache:
    """Return what the wheel has brought."""
    return _caches(settings())[-1].cache


def _skip(cache: Cache, reason: UntrustedError) -> None:
    """Do without a cache that others can have written, and say so once."""
    if cache is user_cache():
        private_cache(reason)  # says where it writes instead
    else:
        cache.place.warn(f"this cache is not searched: {reason}")


def private_cache(reason: CacheError) -> Cache | None:
    """Return a temporary cache of this process's own, because of `reason`; warn once.

    None where not even a temporary directory can be made.
    """
    if user_cache().root == _NOWHERE:
        reason = CacheError("there is no home directory; set HOME or JITKERN_CACHE_DIR")
    return _private.value.get(reason)


class _PrivateCache:
    """The temporary directory of this process for when the cache cannot be written."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self._warned = False
        self._guard = threading.Lock()

    def get(self, reason: CacheError) -> Cache | None:
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
_private = PerProcess(_PrivateCache)
