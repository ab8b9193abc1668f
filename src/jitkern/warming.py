"""`jitkern.warm`: kernels and libraries in the cache before they are needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from jitkern.arch import SUPPORTED_ARCHS, Arch, gpu_archs, requested_archs
from jitkern.cache.get import Lookup, forbidden_by, user_cache
from jitkern.cache.store import Cache
from jitkern.compilers.sources import CSRC
from jitkern.errors import CacheError, CompileError, FrozenError, JitkernError, WarmError
from jitkern.fs import free_bytes, require_writable
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule, compiler_id
from jitkern.jit.loader import checked, load_device
from jitkern.jit.native import NativeLibrary, has_cuda
from jitkern.jit.record import Specialisation, read_record
from jitkern.names import did_you_mean
from jitkern.ops import device_ops
from jitkern.ops._ops import KERNEL_OPS, SIZES, op_names, op_sizes

# NVRTC 13.5 took 146 MB for one compile at a time and 12 MB more for each further thread; nvcc
# takes about 200 MB a compile. Twice that leaves room for kernels larger than jitkern's own.
_COMPILE_BYTES = 400 << 20

# Failures of one job; the others go on.
_FAILURES = (JitkernError, OSError, ValueError, TypeError)


class ArgumentError(ValueError):
    """A wrong argument of ``warm``, in parts: the command line has other names for arguments."""

    def __init__(self, argument: str, text: str) -> None:
        self.argument, self.text = argument, text
        super().__init__(f"warm: {argument}: {text}")


@dataclass
class Outcome:
    """A kernel for one arch, or a library, and what became of it in ``warm``.

    Attributes
    ----------
    name : str
        The op, or the name passed to ``load_jit``.
    parameters : str
        Template arguments, such as ``656, 16, 4``.
    arch : str
        For example ``9.0``; empty for host code.
    source : str
        ``compiled``, ``cached``, ``shipped``, ``memo``, ``failed`` or ``missing``.
    elapsed_ms, num_bytes : float, int or None
        Milliseconds of the job and bytes of the code; None if it is failed or missing.
    error : Exception or None
        The reason of a failure.
    kernel : str
        The name in profilers of a kernel of jitkern's own, such as ``jitkern_store_656B_v16_i64``;
        else empty.
    """

    name: str
    parameters: str
    arch: str
    find: Callable[[], Lookup[Any] | None] = lambda: None
    build: Callable[[], Lookup[Any] | None] = lambda: None
    is_library: bool = False
    lookup: Lookup[Any] | None = None
    source: str = "missing"
    elapsed_ms: float | None = None
    num_bytes: int | None = None
    error: Exception | None = None
    kernel: str = ""

    def __str__(self) -> str:
        return f"{self.title} for {self.arch}" if self.arch else self.title

    @property
    def title(self) -> str:
        """The name of a kernel of jitkern's own; of others, the name and template arguments."""
        return self.kernel or (f"{self.name}<{self.parameters}>" if self.parameters else self.name)

    def run(self, step: Callable[[], Lookup[Any] | None]) -> Outcome:
        """Do `find` or `build`, and keep its look-up or its error."""
        try:
            self.lookup = step()
        except _FAILURES as error:
            self.source, self.error = "failed", error
        else:
            if self.lookup is not None:
                self.source, self.elapsed_ms = self.lookup.source, self.lookup.ms
                self.num_bytes = len(self.lookup.entry.data)
        return self

    @property
    def is_to_copy(self) -> bool:
        """Whether ``warm(out=)`` copies it: each wheel of jitkern has the host module."""
        return self.lookup is not None and not (self.source == "shipped" and self.is_library)


def warm(
    ops: Sequence[str] | None = None,
    row_bytes: Sequence[int] = (),
    archs: Sequence[Arch | str] | None = None,
    replays: Sequence[str | PathLike[str]] = (),
    *,
    head_dims: Sequence[int] = (),
    formats: Sequence[str] = (),
    check: bool = False,
    out: str | PathLike[str] | None = None,
    progress: Callable[[Outcome, int, int], object] | None = None,
) -> list[Outcome]:
    """Compile kernels and libraries into the cache before they are needed; needs no GPU.

    Builds the host module first; without arguments it builds nothing else. What is built is not
    loaded into this process. Blocks until all builds are done.

    Parameters
    ----------
    ops
        Names of ops, such as ``store_cache`` or ``store``. Default: all that have kernels for the
        given sizes.
    row_bytes
        Bytes per row (not per value). For each size, builds the kernels for contiguous tensors.
    archs
        Compute capabilities, such as ``["9.0", "10.0"]``. Default for ops: JITKERN_ARCH, else the
        GPUs of this machine. Default for records: those of the recorded run.
    replays
        Records of earlier runs, written with ``JITKERN_RECORD``. They name files to compile and
        compiler flags: use only records that you trust like code.
    head_dims
        Values per head (not bytes), for ``merge_states``, which has no ``row_bytes``.
    formats
        Formats of rows, such as ``fp8_ds_mla``, for ``store_rows`` and ``gather_rows``: the shapes
        of the models that use them.
    check
        Build nothing; kernels that are in no cache are ``missing``. If there is no compiler, code
        of any compiler counts as present, as it does in a call.
    out
        A directory that receives a copy of everything, for use as JITKERN_CACHE_PATH.
    progress : callable, optional
        ``progress(outcome, done, total)``, called after each build.

    Raises
    ------
    WarmError
        Some builds failed, or could not be written to the cache. The others have been built.
        ``outcomes`` has them all; ``error`` of each is the reason.
    FrozenError
        Kernels are missing, and ``freeze`` was called.
    ToolchainError
        Kernels are missing, and there is no compiler. Nothing has been built.
    CacheError
        Kernels are missing and the cache cannot be written.
    ValueError, TypeError
        An argument is invalid, a file is not a record, or `out` cannot be written.
    OSError
        A file cannot be read.
    """
    wanted_archs = _archs(archs)
    sizes = {"row_bytes": row_bytes, "head_dims": head_dims, "formats": formats}
    wanted_ops = sized_ops(ops, sizes)
    if out is not None and not isinstance(out, (str, PathLike)):
        raise TypeError(f"warm: out: {out!r}, expected the path of a directory")
    if check and out is not None:
        raise ArgumentError("out", f"{os.fspath(out)!r}, expected none: a check writes nothing")
    user_cache().check()
    if out is not None:
        try:
            require_writable(Path(out), "give a directory of yours", mode=0o755)
        except CacheError as error:
            raise ArgumentError("out", str(error)) from error
    try:
        recorded = [used for file in _listed("replays", replays) for used in read_record(file)]
    except ValueError as error:
        raise ArgumentError("replays", str(error)) from error
    outcomes = [Outcome("host module", "", "", host.find_built, host.find, is_library=True)]
    if wanted_ops:
        for_archs = wanted_archs or list(dict.fromkeys(requested_archs() or gpu_archs()))
        if not for_archs:
            came = "none given, JITKERN_ARCH is not set, and there is no GPU to ask"
            raise ArgumentError("archs", f"{came}; expected one, such as 9.0")
        if (oldest := min(for_archs)) < SUPPORTED_ARCHS[0]:
            expected = f"{SUPPORTED_ARCHS[0]} or newer, which the ops need"
            raise ArgumentError("archs", f"{oldest}, expected {expected}")
        outcomes += op_jobs(wanted_ops, for_archs)
    outcomes += recorded_jobs(recorded, wanted_archs)
    for outcome in outcomes:
        if outcome.error is None:
            outcome.run(outcome.find)
    missing = [outcome for outcome in outcomes if outcome.source == "missing"]
    if missing and not check:  # else the cache need not be writable
        _build(missing, progress)
    for outcome in outcomes:
        if outcome.lookup is not None and outcome.lookup.path is None:
            # The process has it in memory; the image or the next server would not.
            text = f"{user_cache().root}: cannot be written: compiled, and not kept"
            outcome.source, outcome.error = "failed", CacheError(text)
    for outcome in outcomes:
        if out is not None and outcome.lookup is not None and outcome.is_to_copy:
            # From memory: the cache may have evicted it since.
            Cache(Path(out), shared=True).publish(outcome.lookup.entry)
    if any(outcome.error for outcome in outcomes):
        raise WarmError(_failures_text(outcomes), outcomes)
    return outcomes


# -- arguments -------------------------------------------------------------------------------------


def _listed(argument: str, value: Any) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, (str, PathLike, Arch)):
        return list(value)
    raise TypeError(f"warm: {argument}: {value!r}, expected a list, such as [{value!r}]")


def sized_ops(
    ops: Sequence[str] | None, sizes_by_name: dict[str, Sequence[Any]]
) -> list[tuple[str, Any]]:
    """Return the ops, by their stems, each with the sizes that it is compiled for."""
    stems, size_of = op_names(), op_sizes()
    sizes = {size: _listed(size.name, sizes_by_name[size.name]) for size in SIZES}
    names = list(stems) if ops is None else _listed("ops", ops)
    for op in names:
        if op not in stems:
            listed = [known.function for known in KERNEL_OPS]
            suggestions = {known.stem: known.function for known in KERNEL_OPS}
            hint = did_you_mean(str(op), suggestions | {name: name for name in listed})
            raise ArgumentError("ops", f"{op!r}, expected one of {', '.join(listed)}{hint}")
        size = size_of[op]
        if ops is not None and not sizes[size]:
            such_as = (*size.choices, *size.example.split(","))[0]
            raise ArgumentError(size.name, f"not given, expected for {op!r}, such as {such_as}")
    for size, values in sizes.items():
        for value in values:
            if not size.accepts(value):
                raise ArgumentError(size.name, f"{value!r}, expected {size.expected}")
        if values and size not in {size_of[op] for op in names}:
            fits = " or ".join(op.function for op in KERNEL_OPS if op.sized_by == size.name)
            came = ", ".join(map(str, values))
            text = f"{came} fits none of the ops {', '.join(names)}; add {fits}"
            raise ArgumentError(size.name, text)
    return list(dict.fromkeys((stems[op], n) for op in names for n in sizes[size_of[op]]))


def _archs(archs: Sequence[Arch | str] | None) -> list[Arch]:
    listed = [] if archs is None else _listed("archs", archs)
    try:
        parsed = [arch if isinstance(arch, Arch) else Arch.parse(str(arch)) for arch in listed]
    except ValueError as error:
        raise ArgumentError("archs", str(error).removeprefix("arch: ")) from error
    return list(dict.fromkeys(parsed))


# -- what is wanted --------------------------------------------------------------------------------


def op_jobs(wanted: Iterable[tuple[str, Any]], archs: Sequence[Arch]) -> list[Outcome]:
    """Return what ops and their sizes need: each kernel for each arch."""
    return [_of_kernel(kernel, arch) for kernel in kernels_of(wanted) for arch in archs]


def kernels_of(wanted: Iterable[tuple[str, Any]]) -> list[DeviceModule]:
    """Return the kernels of ops and sizes, those that ops share once."""
    kernels: dict[DeviceModule, None] = {}
    for op, size in wanted:
        kernels |= dict.fromkeys(device_ops()[op].kernels(size))
    return list(kernels)


def recorded_jobs(recorded: Iterable[Specialisation], archs: Sequence[Arch] = ()) -> list[Outcome]:
    """Return the jobs of a recorded run, for `archs` or for those that it was recorded for."""
    jobs: dict[str, Outcome] = {}
    for used in recorded:
        is_kernel = bool(used.options.get("device_files"))
        for_archs: Sequence[Arch | None] = archs if is_kernel or has_cuda(used) else (None,)
        try:
            specialisation = checked(used.function, used.args, used.options)
            kernel = load_device(specialisation) if is_kernel else None
            outcomes = [
                _of_kernel(kernel, arch) if kernel and arch else _of_library(specialisation, arch)
                for arch in for_archs or (Arch.parse(used.arch),)
            ]
        except _FAILURES as error:
            name, *args = used.args
            outcomes = [Outcome(name, ", ".join(args), used.arch, source="failed", error=error)]
        for outcome in outcomes:
            # Recorded for 9.0 and for 10.0, and one of them is asked for: one job.
            jobs.setdefault(used._replace(arch=outcome.arch).to_json(), outcome)
    return list(jobs.values())


def _of_kernel(kernel: DeviceModule, arch: Arch) -> Outcome:
    find, build = partial(kernel._find, arch), partial(kernel._lookup, arch)
    is_ours = kernel.files[0].is_relative_to(CSRC)
    name_in_profilers = kernel.exports[0] if is_ours else ""
    args = ", ".join(kernel.args)
    return Outcome(kernel.op, args, str(arch), find, build, kernel=name_in_profilers)


def _of_library(used: Specialisation, arch: Arch | None) -> Outcome:
    # Made when it is asked for: tvm-ffi is imported for its key.
    library = partial(NativeLibrary, used, arch, load=False)
    find, build = (lambda: library().find()), (lambda: library().get())
    name, *args = used.args
    return Outcome(name, ", ".join(args), str(arch or ""), find, build, is_library=True)


# -- looking and building --------------------------------------------------------------------------


def default_threads() -> int:
    """Return how many compiles to run at a time: this process's cores, as far as memory allows."""
    cores = len(os.sched_getaffinity(0))
    free = free_bytes()
    return cores if free is None else max(1, min(cores, free // _COMPILE_BYTES))


def _build(
    missing: Sequence[Outcome], progress: Callable[[Outcome, int, int], object] | None
) -> None:
    if by := forbidden_by():
        raise FrozenError(
            f"warm: {_named(missing)}: missing, and {by}, which forbids to compile: warm without it"
        )
    require_writable(user_cache().root, "set JITKERN_CACHE_DIR to a directory of yours")
    if not all(outcome.is_library for outcome in missing):
        compiler_id()  # raises ToolchainError if there is none
    count = itertools.count(1)

    def show(outcome: Outcome) -> None:
        if progress is not None:
            progress(outcome, next(count), len(missing))

    for outcome in missing:
        if outcome.is_library:  # one after the other: ninja keeps all cores busy with each
            show(outcome.run(outcome.build))
    pool = ThreadPoolExecutor(default_threads(), thread_name_prefix="jitkern-warm")
    kernels = [outcome for outcome in missing if not outcome.is_library]
    futures = [pool.submit(kernel.run, kernel.build) for kernel in kernels]
    try:
        for done in as_completed(futures):
            show(done.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _failures_text(outcomes: Sequence[Outcome]) -> str:
    """Say what failed and why, equal reasons once; then the log of the first compiler."""
    failed_by: dict[str, list[Outcome]] = {}
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        error = outcome.error
        reason = error.message if isinstance(error, CompileError) else str(error)
        failed_by.setdefault(" ".join(reason.split()), []).append(outcome)
    lines = [f"{_named(some)}: {reason}" for reason, some in failed_by.items()]
    separator = "\n  " if len(lines) > 1 else " "
    text = separator.join([f"{len(failed)} of {len(outcomes)} failed:", *lines])
    logs = [str(outcome.error) for outcome in failed if isinstance(outcome.error, CompileError)]
    return "\n".join([text, *logs[:1]])


def _named(outcomes: Sequence[Outcome]) -> str:
    return f"{outcomes[0]}" + (f" and {len(outcomes) - 1} more" if len(outcomes) > 1 else "")
