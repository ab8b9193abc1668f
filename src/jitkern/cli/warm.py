"""``jitkern warm``: compile kernels before they are needed, on any machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.cli import ui
from jitkern.cli.machine import default_jobs, gpu_archs
from jitkern.errors import CacheError, CompileError, JitkernError

if TYPE_CHECKING:
    from jitkern.arch import Arch
    from jitkern.jit.device import DeviceModule, Lookup
    from jitkern.jit.record import Specialisation

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache, for the archs of --arch, else of JITKERN_ARCH, else of the GPUs
present. Needs no GPU. The host module is built first, so that a first request pays nothing."""
EXAMPLE = """
jitkern warm --element-size 656
jitkern warm --element-size 256,1024 --op store,index --arch 9.0,10.0 --out kernels/
jitkern warm --replay run.jsonl --arch 9.0
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--element-size",
        type=ui.row_bytes,
        action="extend",
        metavar="BYTES",
        help="bytes of a row; several as 256,656 or by repeating the option",
    )
    parser.add_argument(
        "--op",
        type=ui.names,
        action="extend",
        metavar="OP[,OP]",
        help="store, index, h2d_gather; default: all ops that have a kernel",
    )
    parser.add_argument(
        "--arch",
        type=ui.archs,
        action="extend",
        metavar="A[,A]",
        help="such as 9.0,10.0; default: JITKERN_ARCH, else the GPUs present",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="build what JITKERN_RECORD=FILE has written"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write all that was asked for into DIR, a cache for JITKERN_CACHE_PATH",
    )
    parser.add_argument(
        "--jobs",
        type=ui.jobs,
        metavar="N",
        help="compiles at a time; default: the cores, as far as memory allows",
    )


@dataclass(frozen=True)
class Job:
    """One kernel to have for one arch."""

    op: str
    parameters: str
    arch: str
    build: Callable[[], Lookup]

    def row(self, found: Lookup | None) -> Row:
        """Return the line of the table; None where it did not compile."""
        if found is None:
            return Row(self.op, self.parameters, self.arch, "failed")
        return Row(
            self.op,
            self.parameters,
            self.arch,
            found.source,
            ms=found.ms,
            size_bytes=found.bytes,
            path=found.path,
        )


@dataclass(frozen=True)
class Row:
    """One line of the table; `path` is the entry's directory, if it has one."""

    op: str
    parameters: str
    arch: str
    source: str
    ms: float | None = None
    size_bytes: int | None = None
    path: Path | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        ms = "-" if self.ms is None else ui.ms_text(self.ms)
        size = "-" if self.size_bytes is None else f"{self.size_bytes:,}"
        return (self.op, self.parameters, self.arch or "-", self.source, ms, size)


COLUMNS = ("op", "parameters", "arch", "source", ">ms", ">bytes")


def run(args: argparse.Namespace) -> int:
    """Build all that is asked for and print the table."""
    from jitkern.cache.get import user_cache

    start = time.perf_counter()
    if not args.element_size and args.replay is None:
        raise ui.UsageError("warm: expected --element-size BYTES or --replay FILE")
    cure = "set JITKERN_CACHE_DIR to a directory of yours"
    ui.require_writable(user_cache().root, cure)
    if args.out is not None:
        ui.require_writable(args.out, "give --out a directory of yours")

    recorded = _recorded(args.replay)
    device_code = [used for used in recorded if "device_files" in used.options]
    libraries = [used for used in recorded if "device_files" not in used.options]
    modules = list(_ops(args.op)) if args.element_size else []
    archs = _archs(args.arch, needed=bool(args.element_size))

    rows = [_host_row(), *(_load_row(used) for used in libraries)]
    todo = list(_op_jobs(modules, args.element_size or (), archs))
    todo += _replay_jobs(device_code, archs if args.arch else ())
    threads = min(args.jobs or default_jobs(), max(1, len(todo)))
    built, failures = build_all(todo, threads)
    rows += built

    ui.console().print(ui.table(COLUMNS, [row.cells() for row in rows]))
    took_s = time.perf_counter() - start
    ui.say(f"{_tally(rows)} in {took_s:.1f} s, {threads} at a time, in {user_cache().root}")
    if failures:
        # All have been tried, and each is a line of the table; the first one's log tells enough.
        raise failures[0]
    if args.out is not None:
        _copy_entries(rows, args.out)
    return 0


def build_all(jobs: Sequence[Job], threads: int) -> tuple[list[Row], list[CompileError]]:
    """Run `jobs` on `threads` threads with a progress bar; rows are in the order of the jobs.

    What does not compile is a row and an error of the result; any other failure ends it.
    """
    rows: dict[int, Row] = {}
    failures: list[CompileError] = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="jitkern-warm")
    try:
        with _Progress(len(jobs)) as advance:
            pending = {pool.submit(job.build): i for i, job in enumerate(jobs)}
            for future in as_completed(pending):
                job = jobs[pending[future]]
                try:
                    rows[pending[future]] = job.row(future.result())
                except CompileError as error:
                    rows[pending[future]] = job.row(None)
                    failures.append(error)
                advance(f"{job.op}<{job.parameters}> {job.arch}")
    finally:
        pool.shutdown(cancel_futures=True)
    return [rows[i] for i in sorted(rows)], failures


class _Progress:
    """A bar on standard error that is gone when it is done; nothing where that is no terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = ui.console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=total)

    def __enter__(self) -> Callable[[str], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self, what: str) -> None:
        self._bar.update(self._task, advance=1, description=what)


def op_jobs(op: str, row_bytes: int, archs: Iterable[Arch]) -> list[Job]:
    """Return the jobs of one op and row size: each specialisation for each arch."""
    from jitkern.ops import device_ops

    module = device_ops()[op]
    jobs = []
    for spec in module.specialisations(row_bytes):
        kernel = module.kernel(*spec)
        for arch in archs:
            jobs.append(_job(kernel, arch))
    return jobs


def _job(kernel: DeviceModule, arch: Arch) -> Job:
    return Job(kernel.op, ", ".join(kernel.args), str(arch), lambda: kernel.lookup(arch))


def _op_jobs(ops: Iterable[str], sizes: Iterable[int], archs: Sequence[Arch]) -> Iterable[Job]:
    distinct = list(dict.fromkeys(sizes))
    for op in ops:
        for size in distinct:
            yield from op_jobs(op, size, archs)


def _ops(wanted: Sequence[str] | None) -> list[str]:
    from jitkern.ops import device_ops

    known = list(device_ops())
    for op in wanted or ():
        if op not in known:
            raise ui.UsageError(f"warm: --op: {op!r}, expected one of {', '.join(known)}")
    return list(dict.fromkeys(wanted or known))


def _archs(given: Sequence[Arch] | None, *, needed: bool) -> list[Arch]:
    from jitkern.arch import requested_archs

    if given:
        return list(dict.fromkeys(given))
    try:
        requested = requested_archs()
    except ValueError as error:
        raise ui.UsageError(str(error)) from None
    found = list(dict.fromkeys(requested or gpu_archs())) if needed else []
    if needed and not found:
        raise ui.UsageError(
            "warm: no --arch is given, JITKERN_ARCH is not set, and there is no GPU to ask; "
            "expected one of them, such as --arch 9.0"
        )
    return found


def _recorded(file: Path | None) -> list[Specialisation]:
    from jitkern.jit.record import replay

    if file is None:
        return []
    try:
        return replay(file)
    except ValueError as error:
        raise JitkernError(f"--replay: {error}") from error


def _replay_jobs(recorded: Iterable[Specialisation], archs: Sequence[Arch]) -> list[Job]:
    from jitkern.jit.device import DeviceModule
    from jitkern.jit.loader import load_recorded

    jobs: dict[str, Job] = {}
    for used in recorded:
        kernel = load_recorded(used)
        if not isinstance(kernel, DeviceModule):
            raise JitkernError(f"--replay: {used}: has device_files, but is no device module")
        for arch in archs or (_recorded_arch(used),):
            # Recorded for 9.0 and for 10.0, and --arch 9.0: one job.
            jobs.setdefault(replace(used, arch=str(arch)).to_json(), _job(kernel, arch))
    return list(jobs.values())


def _recorded_arch(used: Specialisation) -> Arch:
    from jitkern.arch import Arch

    try:
        return Arch.parse(used.arch)
    except ValueError as error:
        raise JitkernError(f"--replay: {error}; choose with --arch") from error


def _host_row() -> Row:
    from jitkern.host import module as host

    return timed_load("host module", "", host.module)


def _load_row(used: Specialisation) -> Row:
    from jitkern.jit.loader import load_recorded

    # nvcc builds for JITKERN_ARCH, else for the GPU here; --arch is about kernels by themselves.
    name, *parameters = used.args
    return timed_load(name, ", ".join(parameters), lambda: load_recorded(used))


def timed_load(op: str, parameters: str, load: Callable[[], object]) -> Row:
    """Load host code, and see by the loader's own counts where it came from."""
    from jitkern.cache.stats import stats

    before, start = stats(), time.perf_counter()
    load()
    ms, after = (time.perf_counter() - start) * 1e3, stats()
    for source, was, now in (
        ("compiled", before.compiles, after.compiles),
        ("shipped", before.shipped, after.shipped),
        ("cached", before.cached, after.cached),
    ):
        if now.count > was.count:
            return Row(op, parameters, "", source, ms)
    return Row(op, parameters, "", "memo", ms)


def _tally(rows: Sequence[Row]) -> str:
    counts = dict.fromkeys(("compiled", "cached", "shipped", "memo", "failed"), 0)
    for row in rows:
        counts[row.source] += 1
    parts = [f"{n} {source}" for source, n in counts.items() if n]
    size = ui.bytes_text(sum(row.size_bytes or 0 for row in rows))
    return f"{', '.join(parts)}, {size}"


def _copy_entries(rows: Sequence[Row], directory: Path) -> None:
    """Publish the entries of `rows` in a cache at `directory`."""
    from jitkern.cache.entry import Key, read_entry
    from jitkern.cache.store import Cache

    out = Cache(directory)
    count = 0
    for row in rows:
        if row.path is None:
            continue
        entry = read_entry(row.path)
        meta = entry.meta
        key = Key(*(meta[name] for name in ("route", "name", "family", "toolchain", "describe")))
        out.publish(key, entry.files, {k: v for k, v in meta.items() if k not in DERIVED})
        count += 1
    if not count:
        raise CacheError(f"{directory}: nothing was written there")
    ui.say(f"{count} entries in {directory}; use them with JITKERN_CACHE_PATH={directory}")


DERIVED = ("schema", "route", "name", "family", "toolchain", "describe", "artefact", "files")
