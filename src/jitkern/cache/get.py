"""From a key to a verified entry: search the places, else compile once per node and publish."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key, render_meta
from jitkern.cache.stats import Source
from jitkern.cache.store import Cache
from jitkern.env import Settings, settings
from jitkern.errors import CacheError, CompileError, FrozenError

SHIPPED = Path(__file__).resolve().parent.parent / "_prebuilt"

# Stands for ~/.cache where there is no home directory: nothing can be made below it.
_NOWHERE = Path(os.devnull, "no-home")

_frozen = False


@dataclass(frozen=True)
class Built:
    """What a build hands over for publication; the first file is the artefact."""

    key: Key
    files: Mapping[str, bytes]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """An entry, where it came from, and the milliseconds it took to have it."""

    entry: Entry
    source: Source
    ms: float


def freeze() -> None:
    """Make a missing kernel an error from now on, instead of a compile.

    Call it when a server has warmed up: a miss then raises FrozenError, which names what to warm,
    rather than stalling a request. ``JITKERN_FREEZE=1`` does the same from the start.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.freeze()  # doctest: +SKIP
    """
    global _frozen
    _frozen = True


def is_frozen() -> bool:
    """Tell whether a miss raises."""
    return _frozen or settings().freeze


@lru_cache(maxsize=4)
def _places(current: Settings) -> tuple[tuple[Source, Cache], ...]:
    places: list[tuple[Source, Cache]] = []
    places += [("cached", Cache(path, read_only=True)) for path in current.cache_path]
    home_is_missing = current.cache_dir.parts[:1] == ("~",)
    cache_dir = _NOWHERE if home_is_missing else current.cache_dir
    places.append(("cached", Cache(cache_dir, max_bytes=current.cache_max_bytes)))
    places.append(("shipped", Cache(SHIPPED, read_only=True)))
    return tuple(places)


def user_cache() -> Cache:
    """Return the cache at JITKERN_CACHE_DIR: the one that is written."""
    return _places(settings())[-2][1]


def search(key: Key, accept: Callable[[Mapping[str, Any]], bool] | None = None) -> Found | None:
    """Look `key` up in every place, in order; None where none has it."""
    start = time.perf_counter()
    places = _places(settings())
    if _private.cache is not None:
        places = (*places[:-1], ("cached", _private.cache), places[-1])
    for source, cache in places:
        entry = cache.lookup(key, accept)
        if entry is not None:
            return Found(entry, source, (time.perf_counter() - start) * 1e3)
    return None


def obtain(
    key: Key,
    build: Callable[[], Built],
    *,
    accept: Callable[[Mapping[str, Any]], bool] | None = None,
    verify: Callable[[Path], None] | None = None,
    inputs: Callable[[], str] = lambda: "",
    cure: str = "",
) -> Found:
    """Return the entry of `key`, compiled by `build` if no place has it.

    Parameters
    ----------
    key, accept
        As for :meth:`jitkern.cache.store.Cache.lookup`.
    build
        Compiles; its CompileError is kept for the ranks that wait for the same key.
    verify
        Called with the directory of a new entry before it is published.
    inputs
        Digest of what `build` reads beyond what the key covers; a failure is handed on only to
        builds of the same inputs.
    cure
        End of the FrozenError's message: what would have built the kernel.

    Raises
    ------
    CompileError
        It does not compile, here or in the process that was waited for.
    FrozenError
        It is missing and the process is frozen.
    ToolchainError
        It is missing and there is nothing to compile it with.
    """
    start = time.perf_counter()
    began_unix_s = time.time()
    found = search(key, accept)
    if found is not None:
        return _report(key, found.entry, found.source, start)
    stats.count("misses")
    if is_frozen():
        if key.toolchain and accept is None:
            # Better one made by another compiler than none at all.
            found = search(replace(key, toolchain=""))
            if found is not None:
                return _report(key, found.entry, found.source, start)
        places = ", ".join(str(cache.root) for _, cache in _places(settings()))
        raise FrozenError(f"{key}: not found in {places}, and jitkern is frozen; {cure}".rstrip())

    def poll() -> bool:
        nonlocal found
        found = search(key, accept)
        return found is not None

    cache = user_cache()
    with cache.lock(key, timeout_s=settings().lock_timeout_s, poll=poll) as wait:
        if wait.waited_ms > 1.0:
            stats.count("waits", wait.waited_ms)
        # Looked up again under the lock: another rank may have published between the two.
        found = found or search(key, accept)
        if found is not None:
            return _report(key, found.entry, found.source, start)
        failure = cache.failure(key)
        input_digest = inputs()
        known = failure.recent(input_digest, began_unix_s)
        if known is not None:
            stats.count("failures")
            raise known
        try:
            built = build()
            entry = _publish(cache, built, verify)
        except CompileError as error:
            stats.count("failures")
            failure.write(error, input_digest)
            raise
    stats.count("compiles", (time.perf_counter() - start) * 1e3)
    return _report(built.key, entry, "compiled", start)


def _report(key: Key, entry: Entry, source: Source, start: float) -> Found:
    ms = (time.perf_counter() - start) * 1e3
    if source != "compiled":
        stats.count(source, ms)
    stats.log_lookup(key, source, entry.path, ms)
    return Found(entry, source, ms)


def _publish(cache: Cache, built: Built, verify: Callable[[Path], None] | None) -> Entry:
    try:
        return cache.publish(built.key, built.files, built.meta, verify)
    except CacheError as error:
        reason = error
    if cache.root == _NOWHERE:
        reason = CacheError("there is no home directory; set HOME or JITKERN_CACHE_DIR")
    try:
        private = _private.get(reason)
        return private.publish(built.key, built.files, built.meta, verify)
    except (CacheError, OSError):
        # Not even a temporary directory: a cubin is good in memory, a library is loaded already.
        _private.warn(f"{reason}; nothing compiled by this process is kept")
        if verify is not None:
            raise
        return Entry(None, dict(built.files), render_meta(built.key, built.files, built.meta))


class _PrivateCache:
    """The temporary directory of this process for when the cache cannot be written."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self._warned = False
        self._guard = threading.Lock()

    def get(self, reason: CacheError) -> Cache:
        with self._guard:
            if self.cache is None:
                root = Path(tempfile.mkdtemp(prefix="jitkern-"))  # mode 0700
                self.cache = Cache(root)
                atexit.register(_remove_private, root, os.getpid())
            self.warn(
                f"{reason}; this process keeps what it compiles in {self.cache.root} until it ends"
            )
            return self.cache

    def warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"jitkern: {message}", RuntimeWarning, stacklevel=2)

    def forget_after_fork(self) -> None:
        # The parent removes its directory when it ends, which may be before the child does.
        self.__init__()  # type: ignore[misc]


def _remove_private(root: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        shutil.rmtree(root, ignore_errors=True)


_private = _PrivateCache()
os.register_at_fork(after_in_child=_private.forget_after_fork)
