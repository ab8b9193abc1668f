"""Jobs of having something in the cache, what became of them, and many of them at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from jitkern.cache.get import Lookup
from jitkern.errors import CompileError, JitkernError
from jitkern.free_memory import free_bytes

# NVRTC 13.5 took 146 MB for one compile at a time and 12 MB more for each further thread; nvcc
# takes about 200 MB a compile. Twice that leaves room for kernels larger than jitkern's own.
_COMPILE_BYTES = 400 << 20

FAILURES = (JitkernError, OSError, ValueError, TypeError)
"""What a job may end in while the others go on: whatever its sources, flags and files make it."""


@dataclass(frozen=True)
class Job:
    """One thing to have: a kernel for one arch, or a library.

    `find` looks for it in the caches, `build` builds it if it is in none. `compiler`, the same for
    many jobs, raises ToolchainError where nothing here can build it.
    """

    name: str
    parameters: str
    arch: str
    find: Callable[[], Lookup[Any] | None]
    build: Callable[[], Lookup[Any]]
    is_library: bool = False
    compiler: Callable[[], object] | None = None

    def __str__(self) -> str:
        text = f"{self.name}<{self.parameters}>" if self.parameters else self.name
        return f"{text} for {self.arch}" if self.arch else text


@dataclass(frozen=True)
class Outcome:
    """What became of a job; neither `lookup` nor `error` where it was only looked for in vain."""

    job: Job
    lookup: Lookup[Any] | None = None
    error: Exception | None = None

    @property
    def name(self) -> str:
        """The op, or the name that load_jit was given."""
        return self.job.name

    @property
    def parameters(self) -> str:
        """Template arguments, as in ``656, 16, 4``."""
        return self.job.parameters

    @property
    def arch(self) -> str:
        """What it is for, such as ``9.0``; empty for host code."""
        return self.job.arch

    @property
    def source(self) -> str:
        """``compiled``, ``cached``, ``shipped``, ``memo``, ``failed`` or ``missing``."""
        if self.lookup is not None:
            return self.lookup.source
        return "missing" if self.error is None else "failed"

    @property
    def ms(self) -> float | None:
        """Milliseconds that it took; None where it is not there."""
        return None if self.lookup is None else self.lookup.ms

    @property
    def is_everywhere(self) -> bool:
        """Whether each installation brings it, as the wheel does the host module."""
        return self.source == "shipped" and self.job.is_library

    @property
    def bytes(self) -> int | None:
        """Size of the code; None where it is not there."""
        return None if self.lookup is None else self.lookup.bytes


def look_all(jobs: Sequence[Job], threads: int) -> list[Outcome]:
    """Look for `jobs` in the caches: their outcomes, in the order of the jobs."""
    return _on_threads(jobs, lambda job: job.find(), threads, lambda _: None)


def build_missing(
    looked: Sequence[Outcome], threads: int, advance: Callable[[Job], None] = lambda _: None
) -> list[Outcome]:
    """Build what is missing of `looked`, and return the outcomes of all, in the same order.

    Libraries are built one after the other, since ninja keeps all cores busy with each, and then
    the kernels on `threads` threads.

    Raises
    ------
    ToolchainError
        A compiler is not installed; nothing is built then.
    """
    jobs = [outcome.job for outcome in looked if outcome.source == "missing"]
    for compiler in {job.compiler for job in jobs}:
        if compiler is not None:
            compiler()
    libraries = [job for job in jobs if job.is_library]
    kernels = [job for job in jobs if not job.is_library]
    built = _on_threads(libraries, lambda job: job.build(), 1, advance)
    built += _on_threads(kernels, lambda job: job.build(), threads, advance)
    built_of = {id(outcome.job): outcome for outcome in built}
    return [built_of.get(id(outcome.job), outcome) for outcome in looked]


def _on_threads(
    jobs: Sequence[Job],
    run: Callable[[Job], Lookup[Any] | None],
    threads: int,
    advance: Callable[[Job], None],
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    pool = ThreadPoolExecutor(threads, thread_name_prefix="jitkern-warm")
    try:
        pending = {pool.submit(run, job): i for i, job in enumerate(jobs)}
        for future in as_completed(pending):
            i = pending[future]
            try:
                outcomes[i] = Outcome(jobs[i], future.result())
            except FAILURES as error:
                outcomes[i] = Outcome(jobs[i], None, error)
            advance(jobs[i])
    finally:
        pool.shutdown(cancel_futures=True)
    return [outcomes[i] for i in sorted(outcomes)]


def failures_text(outcomes: Sequence[Outcome]) -> str:
    """Say what failed and why, equal reasons once; then all that the first compiler has said."""
    jobs_of: dict[str, list[Job]] = {}
    log = ""
    for outcome in outcomes:
        error = outcome.error
        if error is not None:
            reason = error.message if isinstance(error, CompileError) else str(error)
            jobs_of.setdefault(" ".join(reason.split()), []).append(outcome.job)
            log = log or (str(error) if isinstance(error, CompileError) else "")
    lines = [f"{named(jobs)}: {reason}" for reason, jobs in jobs_of.items()]
    first = f"{sum(map(len, jobs_of.values()))} of {len(outcomes)} failed:"
    text = f"{first} {lines[0]}" if len(lines) == 1 else "\n  ".join([first, *lines])
    return f"{text}\n{log}".rstrip()


def named(jobs: Sequence[Job]) -> str:
    """Name the first of `jobs`, and say how many more there are."""
    return f"{jobs[0]}" + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")


def default_threads() -> int:
    """Return how many compiles to run at a time: this process's cores, as far as memory allows."""
    cores = len(os.sched_getaffinity(0))
    free = free_bytes()
    return cores if free is None else max(1, min(cores, free // _COMPILE_BYTES))
