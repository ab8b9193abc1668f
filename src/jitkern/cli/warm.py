"""``jitkern warm``: compile kernels before they are needed, on any machine."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.arch import Arch, gpu_archs, requested_archs
from jitkern.cli import ui
from jitkern.errors import CacheError, JitkernError
from jitkern.ops._ops import OPS

if TYPE_CHECKING:
    from jitkern.jit.record import Specialisation
    from jitkern.warming import Job, Outcome

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache, for the archs of --arch, else of JITKERN_ARCH, else of the GPUs
present. Needs no GPU. The host module is built first, so that a first request pays nothing."""
_STEMS = [op.stem for op in OPS if op.has_kernels]
EXAMPLE = f"""
jitkern warm --element-size 656
jitkern warm --element-size 256,1024 --op {",".join(_STEMS[:2])} --arch 9.0,10.0 --out kernels/
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
        help=f"of {', '.join(_STEMS)}; default: all",
    )
    parser.add_argument(
        "--arch",
        type=ui.archs,
        action="extend",
        metavar="A[,A]",
        help="such as 9.0,10.0; default: JITKERN_ARCH, else the GPUs present",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="build what JITKERN_RECORD=FILE has written; it names sources and flags to compile: "
        "replay only what you would run",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="replay even what other users could have written",
    )
    parser.add_argument(
        "--load",
        action="store_true",
        help="also load the libraries that are replayed, to see that they do; that runs their code",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write all that was asked for into DIR, a cache for JITKERN_CACHE_PATH",
    )
    parser.add_argument(
        "--jobs",
        type=ui.count,
        metavar="N",
        help="compiles at a time; default: the cores, as far as memory allows",
    )


COLUMNS = ("op", "parameters", "arch", "source", ">ms", ">bytes")


def run(args: argparse.Namespace) -> int:
    """Build all that is asked for and print the table."""
    from jitkern.cache.search import user_cache
    from jitkern.warming import default_threads, host_module_job, recorded_jobs, run_all

    start = time.perf_counter()
    for option in ("trust", "load"):
        if getattr(args, option) and args.replay is None:
            raise ui.UsageError(f"warm: --{option}: expected along with --replay FILE")
    if not args.element_size and args.replay is None:
        raise ui.UsageError("warm: expected --element-size BYTES or --replay FILE")
    user_cache().place.check()
    ui.require_writable(user_cache().root, "set JITKERN_CACHE_DIR to a directory of yours")
    if args.out is not None:
        ui.require_writable(args.out, "give --out a directory of yours", mode=0o755)

    recorded = _recorded(args.replay, trust=args.trust)
    jobs = _op_jobs(args) if args.element_size else []
    outcomes = [host_module_job().run()]
    try:
        replayed = recorded_jobs(recorded, args.arch or (), load=args.load)
    except ValueError as error:
        raise JitkernError(f"--replay: {error}; choose with --arch") from error
    # Libraries one after the other, since ninja keeps all cores busy with each.
    outcomes += [job.run() for job in replayed if not job.arch]
    jobs += [job for job in replayed if job.arch]
    threads = min(args.jobs or default_threads(), max(1, len(jobs)))
    done = itertools.count(1)
    with ui.progress() as tell:
        tell("compiling", 0, len(jobs))

        def advance(job: Job) -> None:
            tell(f"{job.name}<{job.parameters}> {job.arch}", next(done), len(jobs))

        built, failures = run_all(jobs, threads, advance)
    outcomes += built

    ui.console().print(ui.table(COLUMNS, map(_cells, outcomes)))
    took_s = time.perf_counter() - start
    ui.say(f"{_tally(outcomes)} in {took_s:.1f} s, {threads} at a time, in {user_cache().root}")
    if failures:
        # All have been tried, and each is a line of the table; the first one's log tells enough.
        raise failures[0]
    if args.out is not None:
        _copy_kernels(built, args.out)
    return 0


def _cells(outcome: Outcome) -> tuple[str, ...]:
    job, found = outcome.job, outcome.lookup
    ms = "-" if found is None else ui.ms_text(found.ms)
    size = "-" if found is None or not job.arch else f"{found.bytes:,}"
    return (job.name, job.parameters, job.arch or "-", outcome.source, ms, size)


def _op_jobs(args: argparse.Namespace) -> list[Job]:
    from jitkern.warming import op_jobs

    for op in args.op or ():
        if op not in _STEMS:
            raise ui.UsageError(f"warm: --op: {op!r}, expected one of {', '.join(_STEMS)}")
    archs = _archs(args.arch)
    return [
        job
        for op in dict.fromkeys(args.op or _STEMS)
        for row_bytes in dict.fromkeys(args.element_size)
        for job in op_jobs(op, row_bytes, archs)
    ]


def _archs(given: Sequence[Arch] | None) -> list[Arch]:
    try:
        archs = given or requested_archs() or gpu_archs()
    except ValueError as error:
        raise ui.UsageError(str(error)) from None
    if not archs:
        raise ui.UsageError(
            "warm: no --arch is given, JITKERN_ARCH is not set, and there is no GPU to ask; "
            "expected one of them, such as --arch 9.0"
        )
    return list(dict.fromkeys(archs))


def _recorded(file: Path | None, *, trust: bool) -> list[Specialisation]:
    from jitkern.jit.record import replay

    if file is None:
        return []
    try:
        return replay(file, trust=trust)
    except ValueError as error:
        raise JitkernError(f"--replay: {error}") from error


def _tally(outcomes: Sequence[Outcome]) -> str:
    sources = [outcome.source for outcome in outcomes]
    order = ("compiled", "cached", "shipped", "memo", "failed")
    parts = [f"{sources.count(source)} {source}" for source in order if source in sources]
    kernels = [o.lookup.bytes for o in outcomes if o.lookup is not None and o.job.arch]
    return f"{', '.join(parts)}, {ui.bytes_text(sum(kernels))}"


def _copy_kernels(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Publish the kernels' entries in a cache at `directory`."""
    from jitkern.cache.bundle import copy_entries
    from jitkern.cache.store import Cache

    paths = [o.lookup.path for o in outcomes if o.lookup is not None and o.lookup.path is not None]
    count = copy_entries(paths, Cache(directory, shared=True))
    if not count:
        raise CacheError(f"{directory}: nothing was written there")
    ui.say(f"{count} entries in {directory}; use them with JITKERN_CACHE_PATH={directory}")
