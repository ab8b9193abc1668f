"""``jitkern warm``: compile kernels before they are needed, on any machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.arch import requested_archs
from jitkern.cache.get import user_cache
from jitkern.cli import ui
from jitkern.errors import JitkernError, WarmError
from jitkern.fs import size_text
from jitkern.ops._ops import OPS, SIZES, op_names

if TYPE_CHECKING:
    from jitkern.warming import Outcome

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache, for the archs of --arch, else of JITKERN_ARCH, else of the GPUs
present. Needs no GPU. The host module is built first; without options nothing else is. What the
cache has is not built again."""
_WITH_KERNELS = [op for op in OPS if op.has_kernels]
EXAMPLE = """
jitkern warm --element-size 656
jitkern warm --element-size 256,1024 --op store_cache,indexing --arch 9.0,10.0 --out kernels/
jitkern warm --element-size 1024 --head-dim 64,128 --arch 9.0
jitkern warm --replay run.jsonl --arch 9.0
jitkern warm --replay run.jsonl --check
"""
COLUMNS = ("op", "parameters", "arch", "source", ">ms", ">bytes")
SOURCES = ("compiled", "cached", "shipped", "memo", "missing", "failed")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for size in SIZES:
        ops = ", ".join(op.function for op in _WITH_KERNELS if op.sized_by == size.name)
        text = f"{size.meaning}, for {ops}; several as 64,1k or by repeating the option"
        add(size.option, type=ui.sizes(size), action="extend", metavar=size.unit, help=text)
    text = f"some of {', '.join(op_names())}; default: all for which a size is given"
    add("--op", type=ui.names, action="extend", metavar="OP[,OP]", help=text)
    text = "such as 9.0,10.0; default: JITKERN_ARCH, else the GPUs present; with --replay the "
    text += "recorded ones"
    add("--arch", type=ui.names, action="extend", metavar="A[,A]", help=text)
    text = "build what a run under JITKERN_RECORD=FILE used; a record brings sources and flags to "
    text += "compile: replay only what you would run; may be repeated"
    add("--replay", type=Path, action="append", metavar="FILE", help=text)
    text = "compile nothing: list what is missing, and exit with 1 if anything is"
    add("--check", action="store_true", help=text)
    text = "also write everything into DIR, a cache for JITKERN_CACHE_PATH"
    add("--out", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Build what is missing, and print the outcome of each job."""
    from jitkern.warming import warm

    start = time.perf_counter()
    sizes: dict[str, Any] = {f"{size.name}s": getattr(args, size.name) or () for size in SIZES}
    if args.arch and not (args.replay or any(sizes.values())):
        options = ", ".join(size.option for size in SIZES)
        raise ui.UsageError(f"warm: --arch: expected along with {options} or --replay")
    failure: WarmError | None = None
    outcomes: Sequence[Outcome]
    try:
        if any(sizes.values()) and not args.arch and not requested_archs():
            ui.require_torch()  # finds the GPUs
        outcomes = warm(
            args.op,
            archs=args.arch,
            files=args.replay or (),
            check=args.check,
            out=args.out,
            progress=_show_progress,
            **sizes,
        )
    except WarmError as error:
        outcomes, failure = error.outcomes, error
    except ValueError as error:  # raised for arguments only; jobs keep theirs in their outcomes
        raise ui.UsageError(str(error)) from error
    shown = [job for job in outcomes if job.lookup is None or not args.check]
    if shown:
        ui.say(ui.table(COLUMNS, map(_cells, shown)))
    sources = [job.source for job in outcomes]
    counts = [f"{sources.count(source)} {source}" for source in SOURCES if source in sources]
    size = size_text(sum(job.bytes or 0 for job in outcomes))
    took_s = time.perf_counter() - start
    ui.say(f"{', '.join(counts)}, {size} in {took_s:.1f} s, in {user_cache().root}")
    if args.out is not None:
        count = sum(job.is_to_copy for job in outcomes)
        ui.say(f"{count} entries in {args.out}; use them with JITKERN_CACHE_PATH={args.out}")
    if failure is not None:
        raise failure
    if "missing" in sources:
        missing = f"{sources.count('missing')} of {len(sources)} missing"
        raise JitkernError(f"{missing}; the same without --check compiles them")
    return 0


def _show_progress(job: Outcome, done: int, jobs: int) -> None:
    if sys.stderr.isatty():
        end = "\r\033[K" if done == jobs else ""
        sys.stderr.write(f"\r\033[K{done}/{jobs} {ui.visible(str(job))}{end}")
        sys.stderr.flush()


def _cells(job: Outcome) -> tuple[str, ...]:
    ms = "-" if job.ms is None else f"{job.ms:.4g}"
    size = "-" if job.bytes is None else f"{job.bytes:,}"
    return (job.name, job.parameters, job.arch or "-", job.source, ms, size)
