"""Look a key up in the caches; if it is missing, build it once per node and publish it.

Caches are searched in this order: JITKERN_CACHE_PATH, JITKERN_CACHE_DIR, what the wheel ships, the
wheel of prebuilt kernels. JITKERN_CACHE_DIR is the one written.
"""

from __future__ import annotations

import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from jitkern.args import choice_arg
from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key
from jitkern.cache.stats import Source
from jitkern.cache.store import EXACT, SHIPPED_WILL_DO, USABLE, Cache
from jitkern.cache.trust import UntrustedError
from jitkern.env import FreezeMode, Settings, settings
from jitkern.errors import CacheError, CompileError, FrozenError
from jitkern.gate import gate

T = TypeVar("T")

SHIPPED = Path(__file__).resolve().parent.parent / "_prebuilt"
KERNELS = "jitkern-kernels"  # the wheel of prebuilt kernels, which one may install beside jitkern

# Stands for ~/.cache if there is no home directory: nothing can be made below it.
_NOWHERE = Path(os.devnull, "no-home")

# The last call of freeze() or unfreeze(); empty before the first: JITKERN_FREEZE decides.
_frozen: FreezeMode | Literal["off", ""] = ""


def freeze(mode: FreezeMode = "raise") -> None:
    """Make a missing kernel an error from now on, instead of a compile.

    Call it when a server has warmed up: a miss then raises FrozenError, which names what to warm,
    rather than stalling a request. ``JITKERN_FREEZE=1`` or ``warn`` does the same from the start.
    A kernel built by another version of the compiler is not missing.

    Parameters
    ----------
    mode : {"raise", "warn"}
        Raise FrozenError for a missing kernel, or compile it after a RuntimeWarning with the same
        text. Raises ValueError for another mode.
    """
    global _frozen
    choice_arg("freeze", "mode", mode, get_args(FreezeMode))
    _frozen = mode


def unfreeze() -> None:
    """Compile missing kernels again, regardless of ``freeze`` and ``JITKERN_FREEZE``."""
    global _frozen
    _frozen = "off"


def forbidden_by() -> str:
    """Return why compiling is forbidden, e.g. ``JITKERN_FREEZE=1 is set``; empty if it is not."""
    if _freeze_mode() != "raise":
        return ""
    return "jitkern.freeze() was called" if _frozen else "JITKERN_FREEZE=1 is set"


def _freeze_mode() -> FreezeMode | None:
    return None if _frozen == "off" else _frozen or settings().freeze


class Searched(NamedTuple):
    """A cache that is searched."""

    origin: str  # what names it: a setting, or a wheel
    source: Source  # what stats() calls a hit in it
    cache: Cache


def caches() -> tuple[Searched, ...]:
    """Return the caches of this process in the order they are searched in."""
    return _caches(settings())


@lru_cache(maxsize=4)
def _caches(now: Settings) -> tuple[Searched, ...]:
    written = _NOWHERE if now.cache_dir.parts[:1] == ("~",) else now.cache_dir
    user = Cache(written, max_bytes=now.cache_max_bytes, home=now.home)
    others = [Cache(path, read_only=True, home=now.home) for path in now.cache_path]
    wheels = {"shipped": SHIPPED}
    # Only sys.path is searched: third-party import hooks may raise arbitrary exceptions.
    spec = PathFinder.find_spec(KERNELS.replace("-", "_"))  # imports nothing of the wheel
    if spec is not None and spec.origin is not None:
        wheels[KERNELS] = Path(spec.origin).parent
    # Wheels are not checked: whoever may write there may write Python code too.
    shipped = {name: Cache(at, read_only=True, shared=True) for name, at in wheels.items()}
    return (
        *(Searched("JITKERN_CACHE_PATH", "cached", cache) for cache in others),
        Searched("JITKERN_CACHE_DIR", "cached", user),
        *(Searched(name, "shipped", cache) for name, cache in shipped.items()),
    )


def folders() -> list[Path]:
    """Return the folders of ``caches``, in the same order."""
    return [searched.cache.root for searched in caches()]


def user_cache() -> Cache:
    """Return the cache at JITKERN_CACHE_DIR, the only one that is written."""
    return next(cache for origin, _, cache in caches() if origin == "JITKERN_CACHE_DIR")


# Entries that this process has built and could not publish, by key.
_unpublished: dict[str, Entry] = {}


def _warn_of_unwritable(reason: CacheError) -> None:
    """Warn once that compiled code stays in memory only, and why."""
    if user_cache().root == _NOWHERE:
        reason = CacheError("there is no home directory; set HOME or JITKERN_CACHE_DIR")
    user_cache().warn(f"{reason}; what this process compiles is kept in memory until it ends")


@dataclass(frozen=True)
class Lookup(Generic[T]):
    """The result of a look-up."""

    source: Source
    ms: float  # how long it took
    entry: Entry
    loaded: T  # what Buildable.load made of the entry

    @property
    def path(self) -> Path | None:
        """Folder of the entry, or None if it is in memory only."""
        return self.entry.path


class Buildable(ABC, Generic[T]):
    """Something that is looked up in the caches, and built if it is missing."""

    key: Key
    variant: str = ""  # what it would be built with; empty if unknown before the build
    has_compiler: bool = True  # without one, any entry that loads will do

    def usable_keys(self) -> Iterator[Key]:
        """Yield the keys to look up, the best first: its own, then those that serve as well."""
        yield self.key

    def rank(self, meta: Mapping[str, Any]) -> int:
        """Rank an entry by its meta: EXACT, USABLE, ... of ``cache.store``."""
        return EXACT if self.variant in ("", meta["toolchain"]) else USABLE

    @abstractmethod
    def load(self, entry: Entry) -> T:
        """Return what callers use, made from an entry; CompileError if it does not load here."""

    @abstractmethod
    def build(self) -> Entry:
        """Build it; CompileError if it does not compile."""

    def hint(self) -> str:
        """Return how to build it before a process is frozen."""
        return ""


def build(wanted: Buildable[Any]) -> Entry:
    """Build it; note in its meta when that was and how long it took."""
    start = time.perf_counter()
    built = wanted.build()
    build_ms = round((time.perf_counter() - start) * 1e3, 3)
    times = {"build_ms": build_ms, "built_unix_s": round(time.time(), 3)}
    return built._replace(meta={**built.meta, **times})


def find(wanted: Buildable[T]) -> Lookup[T] | None:
    """Look something up in the caches; nothing is built."""
    lookup = _find(wanted, time.perf_counter())
    return lookup if lookup is None else _counted(lookup)


def get_or_build(wanted: Buildable[T]) -> Lookup[T]:
    """Look something up in the caches; build it if it is missing.

    Raises CompileError if it does not compile or load; FrozenError or ToolchainError if it is
    missing and may not or cannot be compiled.
    """
    start = time.perf_counter()
    try:
        lookup = _find(wanted, start)
        if lookup is None:
            stats.count("misses")
            _obey_freeze(wanted)
            lookup = _find_or_build_alone(wanted, start)
    except CompileError:
        stats.count("failures")
        raise
    return _counted(lookup)


def _counted(lookup: Lookup[T]) -> Lookup[T]:
    stats.count_lookup(lookup.entry, lookup.source, lookup.ms)
    return lookup


def _find(wanted: Buildable[T], start: float) -> Lookup[T] | None:
    """Look in each cache for an entry that is as good as a build here.

    Without a compiler or frozen any usable entry will do.
    """
    ranks = [EXACT] if wanted.has_compiler else []
    if not wanted.has_compiler or _freeze_mode():
        ranks.append(USABLE)
    for rank in ranks:
        for key in wanted.usable_keys():
            for source, entry in _entries(wanted, key, rank):
                with suppress(CompileError):  # built with newer system libraries, or just evicted
                    loaded = wanted.load(entry)
                    return Lookup(source, (time.perf_counter() - start) * 1e3, entry, loaded)
    return None


def _entries(wanted: Buildable[T], key: Key, least: int) -> Iterator[tuple[Source, Entry]]:
    """Yield the best entry of `key` in each cache, if one has this rank or a higher one."""
    kept = _unpublished.get(str(key))
    if kept is not None and wanted.rank(kept.meta) >= least:
        yield "cached", kept
    for _, source, cache in caches():
        threshold = min(least, SHIPPED_WILL_DO) if source == "shipped" else least
        try:
            entry = cache.lookup(key, wanted.rank, threshold)
        except UntrustedError as error:
            if cache is user_cache():
                _warn_of_unwritable(error)
            else:
                cache.warn(f"this cache is not searched: {error}")
            continue
        if entry is not None:
            yield source, entry


def _find_or_build_alone(wanted: Buildable[T], start: float) -> Lookup[T]:
    """Build under the key's lock, so that one process of this machine builds for all."""
    with gate:  # what a build and its publication import
        import random  # noqa: F401

    cache, timeout_s = user_cache(), settings().lock_timeout_s
    is_there = lambda: _find(wanted, start) is not None  # noqa: E731
    with cache.lock(wanted.key, timeout_s=timeout_s, done=is_there):
        # Again, under the lock: another rank may have published meanwhile.
        if lookup := _find(wanted, start):
            return lookup
        entry = build(wanted)
        try:
            entry = cache.publish(entry)
        except CacheError as error:
            _warn_of_unwritable(error)
            _unpublished[str(wanted.key)] = entry
        loaded = wanted.load(entry)
    return Lookup("compiled", (time.perf_counter() - start) * 1e3, entry, loaded)


def _obey_freeze(wanted: Buildable[T]) -> None:
    """If the process is frozen, raise FrozenError, or warn."""
    mode = _freeze_mode()
    if mode is None:
        return
    frozen = "jitkern is frozen"
    if mode == "warn":
        frozen += " to warn: it is compiled now"
    searched = ", ".join(map(str, folders()))
    name = f"{wanted.key}/{wanted.variant or 'any'}"
    message = f"{name}: not found in {searched}, and {frozen}; {wanted.hint()}".removesuffix("; ")
    if mode == "raise":
        raise FrozenError(message)
    warnings.warn(f"jitkern: {message}", RuntimeWarning, stacklevel=2)
