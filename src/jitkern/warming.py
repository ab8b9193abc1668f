"""`jitkern.warm`: kernels and libraries in the cache before they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from jitkern.arch import Arch, gpu_archs, requested_archs
from jitkern.cache.get import Lookup, forbidden_by
from jitkern.cache.search import user_cache
from jitkern.cache.store import Cache
from jitkern.compilers.find_nvrtc import NVRTC_HINT
from jitkern.errors import FrozenError, ToolchainError, WarmError
from jitkern.host import module as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.image import compiler_id
from jitkern.jit.loader import has_cuda, load_device, native_library
from jitkern.jit.replay import Recorded, replay
from jitkern.jit.specialisation import Specialisation
from jitkern.jobs import (
    FAILURES,
    Job,
    Outcome,
    build_missing,
    default_threads,
    failures_text,
    look_all,
    named,
)
from jitkern.ops import device_ops
from jitkern.ops._ops import SIZES, Size, op_names, op_sizes
from jitkern.scratch import require_writable, scratch_folder

Progress = Callable[[Job, int, int], None]


def warm(
    ops: Sequence[str] | None = None,
    element_sizes: Sequence[int] = (),
    archs: Sequence[Arch | str] | None = None,
    files: Sequence[str | PathLike[str]] = (),
    *,
    head_dims: Sequence[int] = (),
    check: bool = False,
    trust: bool = False,
    load: bool = False,
    out: str | PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Have kernels and libraries in the cache before they are needed, with or without a GPU.

    The host module always is among them; with no arguments nothing else is. What a cache has is
    not built, and nothing is written then.

    Parameters
    ----------
    ops
        Names of ops, such as ``store_cache`` or ``store``. Default all that have kernels
        for what is given of the sizes.
    element_sizes
        Bytes of a row of the tensors: of each, the kernels for contiguous tensors.
    archs
        What to compile for, such as ``["9.0", "10.0"]``. Default for ops JITKERN_ARCH, else the
        GPUs present; for records what they were recorded for.
    files
        Records, written by runs under ``JITKERN_RECORD``. They are code: give what you would run.
    head_dims
        Elements of a head, for ``merge_states``, which is compiled by these instead.
    check
        Only look: nothing is built, and what no cache has is ``missing``. Where there is no
        compiler, code by any compiler counts as there, as it does for a call.
    trust
        Read even records that other users could have written.
    load
        Also load the libraries of the records, which runs code in them.
    out
        A directory that receives all of it as well, a cache for JITKERN_CACHE_PATH.
    threads
        Kernels compiled at a time. Default: the cores, as far as memory allows.
    progress
        Called with each job that has been built, how many are done, and of how many.

    Returns
    -------
    list of Outcome
        For each kernel and arch, and each library: ``name``, ``parameters``, ``arch``, ``source``
        (``compiled``, ``cached``, ``shipped``, ``memo``, ``missing``), ``ms``, ``bytes``.

    Raises
    ------
    WarmError
        Some failed. The others have been built; ``outcomes`` has all, ``error`` of each says why.
    FrozenError
        Some are missing, and the process is frozen.
    ToolchainError
        Kernels are missing, and there is no compiler for them; nothing has been built.
    CacheError
        Some are missing, and the cache cannot be written; or `out` cannot.
    ValueError, TypeError
        An argument makes no sense, or a file is no record.
    OSError
        A file cannot be read.

    Examples
    --------
    >>> import jitkern
    >>> for one in jitkern.warm(element_sizes=[656], archs=["9.0"]):  # doctest: +SKIP
    ...     print(one.name, one.parameters, one.arch, one.source)
    """
    wanted = _archs(archs)
    wanted_ops = _sized_ops(ops, {"element_size": element_sizes, "head_dim": head_dims})
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"warm: threads: {threads!r}, expected 1 or more")
    if out is not None and not isinstance(out, (str, PathLike)):
        raise TypeError(f"warm: out: {out!r}, expected a path")
    if check and out is not None:
        raise ValueError("warm: out: given along with check, which writes nothing")
    user_cache().place.check()
    if out is not None:
        require_writable(Path(out), "give a directory of yours", mode=0o755)
    recorded = _recorded(files, trust)
    jobs = [host_module_job()]
    if wanted_ops:
        for_archs = wanted or default_archs()
        if not for_archs:
            raise ValueError(
                "warm: archs: none is given, JITKERN_ARCH is not set, and there is no GPU to ask; "
                "expected one of them, such as archs=['9.0']"
            )
        jobs += op_jobs(wanted_ops, for_archs)
    with ExitStack() as stack:
        if recorded:
            folder = stack.enter_context(scratch_folder("replay"))
            jobs += recorded_jobs(recorded, folder, wanted, load=load)
        outcomes = look_all(jobs, threads or default_threads())
        if not check:
            outcomes = _built(outcomes, threads or default_threads(), progress)
    if out is not None:
        _copy(outcomes, Path(out))
    if any(outcome.error for outcome in outcomes):
        raise WarmError(failures_text(outcomes), outcomes)
    return outcomes


def default_archs() -> list[Arch]:
    """Return the archs to warm kernels for where none is given: JITKERN_ARCH, else the GPUs'."""
    return list(dict.fromkeys(requested_archs() or gpu_archs()))


def build_kernels(
    out_dir: str | PathLike[str],
    wanted: Iterable[Mapping[str, Any]],
    archs: Sequence[Arch | str],
    *,
    threads: int | None = None,
) -> int:
    """Compile kernels into a cache at `out_dir`, for the wheel of kernels; return how many.

    Whatever caches have is compiled again: what NVRTC of this environment makes goes into the
    wheel, and nothing else. Needs neither a GPU nor a C++ compiler nor torch.

    Parameters
    ----------
    out_dir
        Becomes a cache for others to read.
    wanted
        Ops and sizes, each with some of the arguments of :func:`warm`: ``ops``,
        ``element_sizes``, ``head_dims``.
    archs, threads
        As of :func:`warm`.

    Raises
    ------
    CompileError
        One does not compile.
    ToolchainError
        There is no NVRTC, or one that is too old for an arch.
    ValueError, TypeError
        An argument makes no sense.
    """
    sized: list[tuple[str, int]] = []
    for one in wanted:
        given = {size.name: one.get(f"{size.name}s", ()) for size in SIZES}
        unknown = set(one) - {"ops", *(f"{name}s" for name in given)}
        if unknown:
            expected = ", ".join(["ops", *(f"{name}s" for name in given)])
            raise ValueError(f"build_kernels: wanted: {min(unknown)!r}, expected {expected}")
        sized += _sized_ops(one.get("ops"), given)
    cache = Cache(Path(out_dir), shared=True)
    jobs = itertools.product(_kernels(sized), _archs(archs))
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        entries = list(pool.map(lambda job: job[0].build_into(cache, job[1]), jobs))
    for entry in entries:
        if not entry.artefact_name.endswith(".cubin"):
            raise ToolchainError(
                f"build_kernels: archs: {entry.key.arch}: {entry.variant} makes PTX of it, which "
                f"is for newer drivers only; {NVRTC_HINT}"
            )
    return len(entries)


# -- arguments -------------------------------------------------------------------------------------


def _listed(argument: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, PathLike, int, Arch)):
        raise TypeError(f"warm: {argument}: {value!r}, expected a list, such as [{value!r}]")
    if not isinstance(value, Iterable):
        raise TypeError(f"warm: {argument}: {value!r}, expected a list")
    return list(value)


def _sized_ops(ops: Sequence[str] | None, given: dict[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Return the ops, by their stems, each with the sizes that it is compiled for."""
    sizes = {size: _checked(size, given[size.name]) for size in SIZES}
    stems, size_of = op_names(), op_sizes()
    names = list(stems) if ops is None else _listed("ops", ops)
    for op in () if ops is None else names:
        if op not in stems:
            raise ValueError(f"warm: ops: {op!r}, expected one of {', '.join(stems)}")
        size = size_of[op]
        if not sizes[size]:
            raise ValueError(f"warm: ops: {op!r}, expected along with {size.name}s, {size.meaning}")
    for size in SIZES:
        if sizes[size] and size not in {size_of[op] for op in names}:
            expected = ", ".join(op for op in stems if size_of[op] == size)
            raise ValueError(
                f"warm: {size.name}s: {given[size.name]!r}, expected an op of {expected}"
            )
    wanted = [(stems[op], size) for op in names for size in sizes[size_of[op]]]
    return list(dict.fromkeys(wanted))


def _checked(size: Size, given: Sequence[int]) -> list[int]:
    values = _listed(f"{size.name}s", given)
    for one in values:
        if type(one) is not int or not 1 <= one <= size.largest:
            expected = f"{size.meaning}, 1 to {size.largest}"
            raise ValueError(f"warm: {size.name}s: {one!r}, expected {expected}")
    return list(values)


def _archs(archs: Sequence[Arch | str] | None) -> list[Arch]:
    given = [] if archs is None else _listed("archs", archs)
    try:
        parsed = [arch if isinstance(arch, Arch) else Arch.parse(str(arch)) for arch in given]
    except ValueError as error:
        raise ValueError(f"warm: archs: {str(error).removeprefix('arch: ')}") from None
    return list(dict.fromkeys(parsed))


def _recorded(files: Sequence[str | PathLike[str]], trust: bool) -> list[Recorded]:
    recorded = []
    for file in _listed("files", files):
        if not isinstance(file, (str, PathLike)):
            raise TypeError(f"warm: files: {file!r}, expected a path")
        try:
            recorded += replay(file, trust=trust)
        except ValueError as error:
            raise ValueError(f"warm: files: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"warm: files: {file}: {reason}") from error
    return recorded


# -- jobs ------------------------------------------------------------------------------------------


def host_module_job() -> Job:
    """Return the job of the host module."""
    return Job("host module", "", "", host.find_built, host.find, is_library=True)


def op_jobs(wanted: Iterable[tuple[str, int]], archs: Iterable[Arch]) -> list[Job]:
    """Return the jobs of ops and their sizes: each kernel for each arch, what they share once."""
    for_archs = list(archs)
    return [_kernel_job(kernel, arch) for kernel in _kernels(wanted) for arch in for_archs]


def _kernels(wanted: Iterable[tuple[str, int]]) -> list[DeviceModule]:
    kernels: dict[DeviceModule, None] = {}
    for op, size in wanted:
        module = device_ops()[op]
        of_size = [module.kernel(*spec) for spec in module.specialisations(size)]
        kernels |= dict.fromkeys(of_size + getattr(module, "shared_kernels", list)())
    return list(kernels)


def recorded_jobs(
    recorded: Iterable[Recorded], folder: Path, archs: Sequence[Arch] = (), *, load: bool = False
) -> list[Job]:
    """Return the jobs of a recorded run: what cannot be made of it is a job that fails.

    Parameters
    ----------
    recorded
        What :func:`jitkern.jit.replay.replay` has read.
    folder
        Receives their sources; it is needed until all jobs are done.
    archs
        What to compile for, instead of what each was recorded for.
    load
        Load the libraries too, which runs code in them; by default they are only built.
    """
    jobs: dict[str, Job] = {}
    for one in recorded:
        name, *rest = one.used.args
        parameters = ", ".join(rest)
        is_kernel = bool(one.used.options.get("device_files"))
        for_archs = archs if is_kernel or has_cuda(one.used) else ()
        try:
            used = one.unpack(folder)
            kernel = load_device(used) if is_kernel else None
            if (is_kernel or has_cuda(used)) and not for_archs:
                for_archs = (Arch.parse(used.arch),)
        except FAILURES as error:
            fail = partial(_fail, error)
            jobs[one.to_json(one.used.arch)] = Job(name, parameters, one.used.arch, fail, fail)
            continue
        for arch in for_archs or (None,):
            # Recorded for 9.0 and for 10.0, and one of them is asked for: one job.
            text = one.to_json("" if arch is None else str(arch))
            if text in jobs:
                continue
            if kernel is not None and arch is not None:
                jobs[text] = _kernel_job(kernel, arch)
            else:
                jobs[text] = _library_job(used, arch, parameters, load)
    return list(jobs.values())


def _kernel_job(kernel: DeviceModule, arch: Arch) -> Job:
    find, build = partial(kernel.find, arch), partial(kernel.lookup, arch)
    parameters = ", ".join(kernel.args)
    return Job(kernel.op, parameters, str(arch), find, build, compiler=compiler_id)


def _library_job(used: Specialisation, arch: Arch | None, parameters: str, load: bool) -> Job:
    # Made when it is asked for: tvm-ffi is imported for its key.
    def find() -> Lookup[Any] | None:
        return native_library(used, arch, load=load).find()

    def build() -> Lookup[Any]:
        return native_library(used, arch, load=load).get()

    text = "" if arch is None else str(arch)
    return Job(used.args[0], parameters, text, find, build, is_library=True)


def _fail(error: Exception) -> Any:
    raise error


# -- building --------------------------------------------------------------------------------------


def _built(outcomes: Sequence[Outcome], threads: int, progress: Progress | None) -> list[Outcome]:
    """Build what is missing; where nothing is, nothing is asked of the cache."""
    missing = [outcome.job for outcome in outcomes if outcome.source == "missing"]
    if not missing:
        return list(outcomes)
    by = forbidden_by()
    if by:
        raise FrozenError(
            f"warm: {named(missing)}: missing, and {by}, which forbids to compile: warm without it"
        )
    require_writable(user_cache().root, "set JITKERN_CACHE_DIR to a directory of yours")
    done = itertools.count(1)

    def advance(job: Job) -> None:
        if progress is not None:
            progress(job, next(done), len(missing))

    return build_missing(outcomes, threads, advance)


def _copy(outcomes: Iterable[Outcome], directory: Path) -> None:
    """Publish what there is in a cache at `directory`, but for what each installation has."""
    cache = Cache(directory, shared=True)
    for outcome in outcomes:
        if outcome.lookup is not None and not outcome.is_everywhere:
            # From memory: where they were found they may have been evicted since.
            cache.copy(outcome.lookup.entry)
