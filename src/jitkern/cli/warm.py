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
from jitkern.ops._ops import KERNEL_OPS, SIZES

if TYPE_CHECKING:
    from jitkern.warming import Outcome

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache before a server needs them, on a machine with or without a GPU.
The host module, jitkern's C++ part, is built first; without options, nothing else is built.
Kernels that the cache holds already are not compiled again."""
EXAMPLE = """
jitkern warm --row-bytes 656
jitkern warm --row-bytes 256,1024 --op store_cache,indexing --arch 9.0,10.0 --out kernels/
jitkern warm --row-bytes 1024 --head-dim 64,128 --arch 9.0
jitkern warm --format fp8_ds_mla,fp8_index_k --arch 9.0
jitkern warm --replay run.jsonl --arch 9.0
jitkern warm --replay run.jsonl --check
"""
COLUMNS = ("kernel", "arch", "source", ">ms", ">bytes")
SOURCES = ("compiled", "cached", "shipped", "memo", "missing", "failed")
TINY_ROW_BYTES = 16  # no KV cache has rows this small: the bytes of a value were given
LARGE_HEAD_DIM = 4096  # no model has heads this large: the size of all heads was given


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for size in SIZES:
        ops = ", ".join(op.function for op in KERNEL_OPS if op.sized_by == size.name)
        such_as = f"of {size.expected}" if size.choices else f"such as {size.example}"
        text = f"{size.meaning}, for {ops}; a list {such_as}, or repeat the option"
        how: dict[str, Any] = {"type": ui.sizes(size), "action": "extend", "dest": size.name}
        if size.older_option:
            text += f"; {size.older_option} is an older name of the option"
            add(size.older_option, help=argparse.SUPPRESS, **how)
        add(size.option, metavar=size.unit, help=text, **how)
    ops = ", ".join(op.function for op in KERNEL_OPS)
    text = f"ops to compile, out of {ops}; default: all that the sizes fit"
    add("--op", type=ui.names, action="extend", metavar="OP[,OP]", help=text)
    text = "GPU architectures to compile for, such as 9.0,10.0; default: JITKERN_ARCH, else the "
    text += "GPUs of this machine; with --replay: the recorded ones"
    add("--arch", type=ui.names, action="extend", metavar="A[,A]", help=text)
    text = "record of a run under JITKERN_RECORD=FILE: build the kernels and libraries that it "
    text += "used; a record names sources and flags to compile, so replay only files that you "
    text += "would run; may be repeated"
    add("--replay", type=Path, action="append", metavar="FILE", help=text)
    text = "compile nothing: list missing kernels, and exit with 1 if there are any"
    add("--check", action="store_true", help=text)
    text = "directory that receives a copy of everything, for use as JITKERN_CACHE_PATH"
    add("--out", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Build what is missing, and print the outcome of each job."""
    from jitkern.warming import ArgumentError, warm

    start = time.perf_counter()
    sizes: dict[str, Any] = {size.name: getattr(args, size.name) or () for size in SIZES}
    if args.arch and not (args.op or args.replay or any(sizes.values())):
        options = ", ".join(size.option for size in SIZES)
        raise ui.UsageError(f"warm: --arch: expected along with {options} or --replay")
    for file in args.replay or ():
        if not file.exists():
            raise ui.UsageError(f"warm: --replay: {str(file)!r}, expected a file")
    failure: WarmError | None = None
    outcomes: Sequence[Outcome]
    try:
        if any(sizes.values()) and not args.arch and not requested_archs():
            ui.require_torch()  # finds the GPUs
        outcomes = warm(
            args.op,
            archs=args.arch,
            replays=args.replay or (),
            check=args.check,
            out=args.out,
            progress=_show_progress,
            **sizes,
        )
    except WarmError as error:
        outcomes, failure = error.outcomes, error
    except ArgumentError as error:
        raise ui.UsageError(f"warm: {_option(error.argument)}: {error.text}") from error
    except ValueError as error:  # a wrong variable; jobs keep theirs in their outcomes
        raise ui.UsageError(str(error)) from error
    if tiny := [size for size in args.row_bytes or () if size <= TINY_ROW_BYTES]:
        ui.note(
            f"--row-bytes {', '.join(map(str, tiny))}: bytes per row, not per value; "
            "a row of 8 heads of 128 bf16 values has 2048"
        )
    if large := [dim for dim in args.head_dims or () if dim > LARGE_HEAD_DIM]:
        ui.note(
            f"--head-dim {', '.join(map(str, large))}: elements of one head, not of all heads; "
            "most models have 64 to 256"
        )
    shown = [job for job in outcomes if job.lookup is None or not args.check]
    if shown:
        ui.say(ui.table(COLUMNS, map(_cells, shown)))
    sources = [job.source for job in outcomes]
    counts = [f"{sources.count(source)} {source}" for source in SOURCES if source in sources]
    size = size_text(sum(job.num_bytes or 0 for job in outcomes))
    took_s = time.perf_counter() - start
    ui.say(f"{', '.join(counts)}, {size} in {took_s:.1f} s, in {user_cache().root}")
    if args.out is not None:
        count = sum(job.is_to_copy for job in outcomes)
        ui.say(f"{ui.entries(count)} in {args.out}; use them with JITKERN_CACHE_PATH={args.out}")
    if failure is not None:
        raise failure
    if "missing" in sources:
        missing = f"{sources.count('missing')} of {len(sources)} missing"
        raise JitkernError(f"{missing}; run without --check to compile them")
    return 0


def _option(argument: str) -> str:
    """Return the option that is this argument of ``warm``: a list has the plural of its name."""
    options = {size.name: size.option for size in SIZES}
    return options.get(argument) or f"--{argument.removesuffix('s')}"


def _show_progress(job: Outcome, done: int, jobs: int) -> None:
    if sys.stderr.isatty():
        end = "\r\033[K" if done == jobs else ""
        sys.stderr.write(f"\r\033[K{done}/{jobs} {ui.visible(str(job))}{end}")
        sys.stderr.flush()


def _cells(job: Outcome) -> tuple[str, ...]:
    ms = job.elapsed_ms
    text = "-" if ms is None else f"{ms:,.1f}" if ms < 100 else f"{ms:,.0f}"
    size = "-" if job.num_bytes is None else f"{job.num_bytes:,}"
    return (job.title, job.arch or "-", job.source, text, size)
