"""From a key to what it stands for: found in a cache, else built once per node and published."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key
from jitkern.cache.search import folders, private_cache, search, user_cache
from jitkern.cache.stats import LookupEvent, Source
from jitkern.env import FREEZE_MODES, FreezeMode, settings
from jitkern.errors import CacheError, CompileError, FrozenError

if TYPE_CHECKING:
    from jitkern.cache.store import Cache

T = TypeVar("T")

# What freeze() and unfreeze() have said last; nothing yet: JITKERN_FREEZE decides.
_frozen: FreezeMode | Literal["off", ""] = ""
_warned_of: set[str] = set()


def freeze(mode: FreezeMode = "raise") -> None:
    """Make a missing kernel an error from now on, instead of a compile.

    Call it when a server has warmed up: a miss then raises FrozenError, which names what to warm,
    rather than stalling a request. ``JITKERN_FREEZE=1`` or ``warn`` does the same from the start.
    A kernel that another version of the compiler has made counts as there.

    Parameters
    ----------
    mode : {"raise", "warn"}
        What becomes of a miss: FrozenError, or a RuntimeWarning with the same words, once for each
        kernel, and then the compile.

    Raises
    ------
    ValueError
        Another mode.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.freeze()  # doctest: +SKIP
    """
    global _frozen
    if mode not in FREEZE_MODES:
        raise ValueError(f"freeze: mode: {mode!r}, expected {' or '.join(FREEZE_MODES)}")
    _frozen = mode


def unfreeze() -> None:
    """Compile what is missing again, whatever :func:`freeze` or ``JITKERN_FREEZE`` has said.

    Examples
    --------
    >>> import jitkern
    >>> jitkern.unfreeze()  # doctest: +SKIP
    """
    global _frozen
    _frozen = "off"


def is_frozen() -> bool:
    """Tell whether a miss raises or warns."""
    return _freeze_mode() is not None


def forbidden_by() -> str:
    """Say what forbids to compile, such as ``JITKERN_FREEZE=1 is set``; empty where nothing does.

    The mode ``warn`` forbids nothing.
    """
    if _freeze_mode() != "raise":
        return ""
    reasons = ["JITKERN_FREEZE=1 is set"] if settings().freeze == "raise" else []
    reasons += ["jitkern.freeze() was called"] if _frozen else []
    return " and ".join(reasons)


def _freeze_mode() -> FreezeMode | None:
    return None if _frozen == "off" else _frozen or settings().freeze


class BuildOutput(NamedTuple):
    """What a build hands over for publication; the first file is the artefact."""

    variant: str
    files: Mapping[str, bytes]
    notes: Mapping[str, Any] = MappingProxyType({})


class Lookup(Generic[T]):
    """How something was found: where, in how many milliseconds, and what was made of its entry."""

    def __init__(self, source: Source, ms: float, entry: Entry, loaded: T) -> None:
        self.source = source
        self.ms = ms
        self.entry = entry
        self.loaded = loaded

    @property
    def bytes(self) -> int:
        """Size of the artefact."""
        return len(self.entry.data)

    @property
    def path(self) -> Path | None:
        """Directory of the entry, or None where it could be kept in memory only."""
        return self.entry.path


class Buildable(ABC, Generic[T]):
    """Something that a cache may hold and that can be built.

    Attributes
    ----------
    key
        What it is made from.
    variant
        What it would be built with, if that is known before the build; empty where `accepts` tells,
        or where there is nothing to build it with.
    """

    key: Key
    variant: str = ""

    def accepts(self, meta: Mapping[str, Any]) -> bool:
        """Tell from its meta whether an entry will do."""
        del meta
        return True

    def suits(self, meta: Mapping[str, Any]) -> bool:
        """Tell from its meta whether a shipped entry of another variant will do, too."""
        del meta
        return False

    def prefers(self, meta: Mapping[str, Any]) -> bool:
        """Tell from its meta whether an entry goes before others where any variant will do."""
        del meta
        return True

    @abstractmethod
    def load(self, entry: Entry) -> T:
        """Make of an entry what is wanted of it; a new one is published only if that works.

        Raises
        ------
        CompileError
            It does not load. One that was found counts as missing then.
        """

    @abstractmethod
    def build(self) -> BuildOutput:
        """Build it. A CompileError is kept for the ranks that wait for the same key."""

    def inputs(self) -> str:
        """Return a digest of what `build` reads beyond the key: equal ones fail alike."""
        return self.variant

    def hint(self) -> str:
        """Say what would have built it before the process was frozen."""
        return ""


def find(wanted: Buildable[T]) -> Lookup[T] | None:
    """Return what is wanted if a cache has it; nothing is built."""
    start = time.perf_counter()
    found = _find(wanted, wanted.variant, start)
    if found is None and _freeze_mode() is not None:
        found = _find(wanted, "", start)  # made by another compiler: a frozen process takes it
    return found if found is None else _counted(wanted, found)


def get_or_build(wanted: Buildable[T]) -> Lookup[T]:
    """Return what is wanted, built if no cache has it.

    Raises
    ------
    CompileError
        It does not compile or load, here or in the process that was waited for.
    FrozenError
        It is missing and the process is frozen.
    ToolchainError
        It is missing and there is nothing to compile it with.
    """
    start = time.perf_counter()
    try:
        found = _found_or_built(wanted, start)
    except Exception as error:
        _tell(wanted, "failed", wanted.variant, time.perf_counter() - start, error)
        raise
    return _counted(wanted, found)


def _counted(wanted: Buildable[T], found: Lookup[T]) -> Lookup[T]:
    stats.count("compiles" if found.source == "compiled" else found.source, found.ms)
    stats.log_lookup(f"{wanted.key}/{found.entry.variant}", found.source, found.path, found.ms)
    _tell(wanted, found.source, found.entry.variant, found.ms / 1e3)
    return found


def _found_or_built(wanted: Buildable[T], start: float) -> Lookup[T]:
    began_unix_s = time.time()
    found = _find(wanted, wanted.variant, start)
    if found is not None:
        return found
    stats.count("misses")
    mode = _freeze_mode()
    if mode is not None:
        # Better one made by another compiler than none at all.
        found = _find(wanted, "", start)
        if found is not None:
            return found
        if mode == "raise":
            raise FrozenError(_missing(wanted, "jitkern is frozen"))
        _warn_once(wanted)
    return _find_or_build_alone(wanted, start, began_unix_s)


def _tell(
    wanted: Buildable[T],
    source: Source | Literal["failed"],
    variant: str,
    seconds: float,
    error: Exception | None = None,
) -> None:
    if not stats.is_watched():
        return
    key = wanted.key
    stats.tell(
        LookupEvent(
            name=key.op,
            args=key.args,
            arch=key.arch,
            route=key.route,
            source=source,
            seconds=seconds,
            key=str(key),
            variant=variant,
            error=error,
        )
    )


def _find(wanted: Buildable[T], variant: str, start: float) -> Lookup[T] | None:
    for source, entry in _best_first(wanted, variant):
        try:
            loaded = wanted.load(entry)
        except CompileError:
            # Made on a machine with newer system libraries, or evicted a moment ago.
            continue
        return Lookup(source, (time.perf_counter() - start) * 1e3, entry, loaded)
    return None


def _best_first(wanted: Buildable[T], variant: str) -> Iterator[tuple[Source, Entry]]:
    """Yield what the caches have, in their order; last of all what might be of no use here."""
    others = []
    for found in search(wanted.key, variant, wanted.accepts, wanted.suits, wanted.prefers):
        if variant or wanted.prefers(found[1].meta):
            yield found
        else:
            others.append(found)
    yield from others


def _find_or_build_alone(wanted: Buildable[T], start: float, began_unix_s: float) -> Lookup[T]:
    """Build, but let one process of this machine do it for all."""

    def find() -> Lookup[T] | None:
        return _find(wanted, wanted.variant, start)

    cache = user_cache()
    timeout_s = settings().lock_timeout_s
    with cache.lock(wanted.key, timeout_s=timeout_s, done=lambda: find() is not None) as wait:
        if wait.waited_ms > 1.0:
            stats.count("waits", wait.waited_ms)
        # Looked up again under the lock: another rank may have published between the two.
        found = find()
        if found is not None:
            return found
        failure = cache.failure(wanted.key)
        inputs = wanted.inputs()
        known = failure.recent(inputs, began_unix_s)
        if known is not None:
            stats.count("failures")
            raise known
        try:
            entry, loaded = _publish(wanted, wanted.build())
        except CompileError as error:
            stats.count("failures")
            failure.write(error, inputs)
            raise
    return Lookup("compiled", (time.perf_counter() - start) * 1e3, entry, loaded)


def _publish(wanted: Buildable[T], built: BuildOutput) -> tuple[Entry, T]:
    """Load what was built and publish it: for all, else in a cache of this process's own."""
    try:
        return _publish_in(user_cache(), wanted, built)
    except CacheError as error:
        private = private_cache(error)
    if private is not None:
        with suppress(CacheError):
            return _publish_in(private, wanted, built)
    from jitkern.cache.write import render_meta

    meta = render_meta(wanted.key, built.variant, built.files, built.notes)
    entry = Entry(None, built.files, meta)
    return entry, wanted.load(entry)


def _publish_in(cache: Cache, wanted: Buildable[T], built: BuildOutput) -> tuple[Entry, T]:
    with cache.stage(wanted.key, built.variant, built.files, built.notes) as staged:
        loaded = wanted.load(staged)
        return cache.commit(staged), loaded


def _missing(wanted: Buildable[T], so: str) -> str:
    searched = ", ".join(map(str, folders()))
    name = f"{wanted.key}/{wanted.variant or 'any'}"
    return f"{name}: not found in {searched}, and {so}; {wanted.hint()}".removesuffix("; ")


def _warn_once(wanted: Buildable[T]) -> None:
    key = str(wanted.key)
    if key not in _warned_of:
        _warned_of.add(key)
        reason = _missing(wanted, "jitkern is frozen to warn: it is compiled now")
        warnings.warn(f"jitkern: {reason}", RuntimeWarning, stacklevel=2)
